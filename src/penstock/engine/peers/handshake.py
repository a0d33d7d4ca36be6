"""How two peers authenticate each other before they exchange anything else.

    client                                          server
    HELLO      protocol, run, nonce, name   ──►
               ◄──   CHALLENGE   nonce, name, proof of the server
    PROOF      proof of the client          ──►
               ◄──   WELCOME

A proof is an HMAC-SHA256, with the run's secret as its key, of the prover's role and all earlier
frames. These hold both nonces and names, the run and the protocol version, so a proof cannot be
replayed in another run, at another time, in the other direction or for another version. The secret
itself is never sent. The server may instead answer REFUSE with a reason of one byte. Both sides are
state machines without clock or socket: the caller supplies nonces and secrets, and moves the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable

from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES
from penstock.engine.peers.wire import (
    CHALLENGE,
    HELLO,
    PROOF,
    PROTOCOL,
    REFUSE,
    WELCOME,
    Frame,
    WireError,
    framed,
)

NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES_MAX = 64
HELLO_S_MAX = 5.0
"""A server waits no longer for a client to prove itself."""
BYTES_MAX = 1024
"""A server reads no more from a client that has not proven itself."""

_MAGIC = b"penstock"
_HELLO = struct.Struct(f"<8sH{RUN_BYTES}s{NONCE_BYTES}sB")
_CHALLENGE = struct.Struct(f"<H{NONCE_BYTES}sB")

SAID_VERSION, SAID_RUN, SAID_PROOF, SAID_SLOW, SAID_BUSY, SAID_LEAVING = 1, 2, 3, 4, 5, 6
REASONS = {
    SAID_VERSION: "it speaks another protocol; run the same version of Penstock on all nodes",
    SAID_RUN: "it does not know our run; has its run ended, or is it a server of another job?",
    SAID_PROOF: "our proof does not fit its secret of this run",
    SAID_SLOW: f"we took longer than {HELLO_S_MAX:g} s to prove who we are",
    SAID_BUSY: "it has as many connections as it takes",
    SAID_LEAVING: "it is being stopped",
}


class RefusedError(Exception):
    """The other side failed to prove itself, or refused us."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        """The reason to send to the other side; 0: send nothing."""


def refusal(code: int) -> bytes:
    """Return a REFUSE frame."""
    return framed(REFUSE, 0, bytes((code,)))


def reason_in(frame: Frame) -> str:
    """Return why we were refused."""
    code = frame.body[0] if frame.body else 0
    return REASONS.get(code, f"it gave the reason {code}, which we do not know")


def proof_of(secret: bytes, who: bytes, *said: bytes) -> bytes:
    """Return the proof that one side knows the secret and has received the frames `said`."""
    assert len(secret) == SECRET_BYTES, len(secret)
    # Lengths first: else the same bytes, cut into other frames, would have the same proof.
    lengths = struct.pack(f"<{len(said)}I", *map(len, said))
    return hmac.digest(secret, b"".join((_MAGIC, who, lengths, *said)), hashlib.sha256)


def check_name(name: str) -> None:
    """Check that a name fits into a frame."""
    size = len(name.encode())
    assert 0 < size <= NAME_BYTES_MAX, f"a name of {size} bytes: {name!r}"
    assert name.isprintable(), f"a name that cannot be printed: {name!r}"


def _name_in(data: bytes, length: int) -> str:
    if not 0 < length <= NAME_BYTES_MAX or length != len(data):
        raise WireError(f"a name of {len(data)} bytes where {length} were due")
    try:
        name = data.decode()
    except UnicodeDecodeError:
        raise WireError("a name that is no text") from None
    if not name.isprintable():  # names go into logs, which control characters could forge
        raise WireError("a name that cannot be printed")
    return name


class ClientHandshake:
    """The side that connects; it sends `opening` first."""

    def __init__(self, *, name: str, run_id: bytes, secret: bytes, nonce: bytes) -> None:
        assert (len(run_id), len(nonce)) == (RUN_BYTES, NONCE_BYTES)
        data = name.encode()
        self._secret = secret
        self._said = _HELLO.pack(_MAGIC, PROTOCOL, run_id, nonce, len(data)) + data
        self.opening = framed(HELLO, 0, self._said)
        self.expected: tuple[int, ...] = (CHALLENGE, REFUSE)
        """Kinds of frames that may come now."""
        self.peer = ""
        """The server's name; proven once `on` has returned a proof of our own."""
        self.is_done = False

    def on(self, frame: Frame) -> bytes:
        """Take a frame; return the bytes to send in reply."""
        if frame.kind not in self.expected:
            raise WireError(f"a frame of kind {frame.kind} came instead of {self.expected}")
        if frame.kind == REFUSE:
            raise RefusedError(reason_in(frame))
        if frame.kind == WELCOME:
            self.is_done, self.expected = True, ()
            return b""
        said, proof, version, self.peer = _challenge_in(frame.body)
        if version != PROTOCOL:
            raise RefusedError(f"it speaks protocol {version}, we speak {PROTOCOL}")
        # The server proves itself first, so that a stranger gets no proof of ours. Compared in
        # constant time, or the time would tell how many bytes of a guess are right.
        if not hmac.compare_digest(proof, proof_of(self._secret, b"server", self._said, said)):
            raise RefusedError("its proof does not fit our secret of this run")
        self.expected = (WELCOME, REFUSE)
        return framed(PROOF, 0, proof_of(self._secret, b"asker", self._said, said, proof))


def _challenge_in(body: bytes) -> tuple[bytes, bytes, int, str]:
    said, proof = body[:-PROOF_BYTES], body[-PROOF_BYTES:]
    if len(said) < _CHALLENGE.size:
        raise WireError(f"a challenge of {len(body)} bytes")
    version, _, length = _CHALLENGE.unpack_from(said)
    return said, proof, version, _name_in(said[_CHALLENGE.size :], length)


class ServerHandshake:
    """The side that is connected to."""

    def __init__(
        self, *, name: str, secrets: Callable[[bytes], bytes | None], nonce: bytes
    ) -> None:
        assert len(nonce) == NONCE_BYTES
        data = name.encode()
        self._secrets = secrets
        self._answer = _CHALLENGE.pack(PROTOCOL, nonce, len(data)) + data
        self._due = b""
        self.expected: tuple[int, ...] = (HELLO,)
        self.peer = ""
        """The client's name; proven once `is_done`."""
        self.run_id = b""
        self.is_done = False

    def on(self, frame: Frame) -> bytes:
        """Take a frame; return the bytes to send in reply."""
        if frame.kind not in self.expected:
            raise WireError(f"a frame of kind {frame.kind} came instead of {self.expected}")
        return self._challenged(frame.body) if frame.kind == HELLO else self._welcomed(frame.body)

    def _challenged(self, said: bytes) -> bytes:
        if len(said) < _HELLO.size:
            raise WireError(f"a hello of {len(said)} bytes")
        magic, version, run_id, _, length = _HELLO.unpack_from(said)
        if magic != _MAGIC:
            raise WireError("a hello that is not ours")
        if version != PROTOCOL:
            raise RefusedError(f"speaks protocol {version}, we speak {PROTOCOL}", SAID_VERSION)
        self.peer, self.run_id = _name_in(said[_HELLO.size :], length), run_id
        secret = self._secrets(run_id)
        if secret is None:
            raise RefusedError(f"belongs to the run {run_id.hex()}, unknown here", SAID_RUN)
        proof = proof_of(secret, b"server", said, self._answer)
        self._due = proof_of(secret, b"asker", said, self._answer, proof)
        self.expected = (PROOF,)
        return framed(CHALLENGE, 0, self._answer + proof)

    def _welcomed(self, proof: bytes) -> bytes:
        if not hmac.compare_digest(proof, self._due):
            raise RefusedError("has another secret of its run", SAID_PROOF)
        self.is_done, self.expected = True, ()
        return framed(WELCOME)
