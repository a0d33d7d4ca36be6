"""A program for the hosts of a test network: serves bytes and echoes, pulls, and pings.

talk.py serve ADDRESS          answers "pull N" by N bytes and "ping" by "pong"
talk.py pull ADDRESS N         prints bytes a second
talk.py ping ADDRESS           pings once for each line of input; prints seconds, or "silent"
"""

import socket
import sys
import threading
import time

PORT = 5000
SILENT_S = 0.25


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def serve(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, PORT), family=family) as server:
        say("ready")
        while True:
            threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()


def answer(connection: socket.socket) -> None:
    with connection, connection.makefile("r") as lines:
        for line in lines:
            if line == "ping\n":
                connection.sendall(b"pong")
            else:
                connection.sendall(bytes(int(line.split()[1])))


def pull(address: str, num_bytes: int) -> None:
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(f"pull {num_bytes}\n".encode())
        buffer, left, start_s = bytearray(1 << 20), num_bytes, time.monotonic()
        while left > 0 and (got := connection.recv_into(buffer)):
            left -= got
        say(num_bytes / (time.monotonic() - start_s))


def ping(address: str) -> None:
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENT_S)
        owed = 0
        for _ in sys.stdin:
            start_s = time.monotonic()
            owed += 4
            connection.sendall(b"ping\n")
            try:
                while owed:  # answers to earlier pings come first
                    owed -= len(connection.recv(owed))
                say(time.monotonic() - start_s)
            except TimeoutError:
                say("silent")


if __name__ == "__main__":
    verb, address, *more = sys.argv[1:]
    {"serve": serve, "pull": pull, "ping": ping}[verb](address, *map(int, more))
