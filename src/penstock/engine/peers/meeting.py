"""How the nodes of a run agree on one list of members, where keys of earlier runs may lie.

The first rank of every node puts a *hello* under its rank, with a random number. Rank 0 leads.
Ranks are numbered node by node, so each hello tells the leader the rank of the next one. The leader
puts the *roster*, which has all hellos, the run's id and its secret, under a random name. It then
tells each node that name, under the number of the node's hello. A node that finds its hello in the
roster acknowledges it.

A hello may be left over from an earlier run, for instance of workers that torchrun has replaced by
others with the same ranks and names. Then nobody acknowledges for it, but its node's new process
puts a new hello. The leader then makes another roster, and tells those who hold the former one. A
roster that all have acknowledged is final. Old keys cannot affect it, because processes that are
alive now have drawn all the names it depends on.

The other ranks of a node are not needed for this and may come late. They find the roster under
their node's first rank. To tell it from an old one, they check that the process that put it runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from penstock.engine.peers.facts import NodeRecord
from penstock.engine.peers.keys import RUN_BYTES, SECRET_BYTES, shown
from penstock.engine.peers.rendezvous import PollSchedule, Rendezvous, wait_for
from penstock.engine.peers.runs import is_in_sight, is_running, process_mark
from penstock.errors import RendezvousError
from penstock.units import show_seconds

T = TypeVar("T")

_FINAL = b"final"
_HELLOS_SOUGHT_MAX = 256
"""Hellos read for the error that says who is missing."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A node's description of itself."""

    number: str
    rank: int
    num_local_ranks: int
    num_ranks: int
    record: NodeRecord
    digest: dict[str, str]
    process: str

    def __str__(self) -> str:
        return f"{self.record.host} ({_ranks(self.rank, self.rank + self.num_local_ranks)})"


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of a run, its id and its secret."""

    run_id: bytes
    secret: bytes
    hellos: list[Hello]

    def __repr__(self) -> str:
        return shown(self)


# Prepares the type in one thread: msgspec can crash if several threads do so at once.
msgspec.msgpack.Decoder(Roster)


class _RosterPointer(msgspec.Struct, frozen=True):
    """Where the other ranks of a node find the roster."""

    process: str
    roster: str


class Meeting:
    """One process's part in one meeting."""

    def __init__(
        self, place: Rendezvous, key: str, *, num_ranks: int, timeout_s: float, is_once: bool
    ) -> None:
        self._place = place
        self._key = key
        self._num_ranks = num_ranks
        self._patience = PollSchedule(timeout_s)
        self._is_once = is_once
        self._roster = ""
        """The name under which the final roster lies."""

    # -- the three parts ----------------------------------------------------------------------

    def lead(self, hello: Hello) -> Roster:
        """Gather all nodes and return the final roster; for the process of rank 0."""
        known, before = {0: hello}, ""
        self._put("hello/0", msgspec.msgpack.encode(hello))
        while True:
            name = secrets.token_hex(8)
            roster = Roster(
                run_id=secrets.token_bytes(RUN_BYTES),
                secret=secrets.token_bytes(SECRET_BYTES),
                hellos=self._gathered(known),
            )
            # The roster first: a node that reads its name looks for it at once.
            self._put(f"roster/{name}", msgspec.msgpack.encode(roster))
            for other in roster.hellos[1:]:
                self._put(f"answer/{other.number}", name.encode())
            if before:  # nodes that have acknowledged the former roster wait for this key
                self._put(f"end/{before}", name.encode())
            newer = self._newer_hello(name, roster)
            if newer is None:
                self._put(f"end/{name}", _FINAL)
                self._tell_node(0, hello, name)
                self._roster = name
                return roster
            known[newer.rank] = newer
            before = name

    def follow(self, hello: Hello) -> Roster:
        """Say hello and return the final roster; for the first ranks of all other nodes."""
        self._put(f"hello/{hello.rank}", msgspec.msgpack.encode(hello))
        name = self._wait(f"answer/{hello.number}").decode()
        while True:
            roster = msgspec.msgpack.decode(self._wait(f"roster/{name}"), type=Roster)
            self._put(f"acknowledged/{name}/{hello.rank}", b"")
            end = self._wait(f"end/{name}")
            if end == _FINAL:
                self._tell_node(hello.rank, hello, name)
                self._roster = name
                return roster
            name = end.decode()

    def find(self, first_rank: int) -> Roster:
        """Return the roster that the node's first rank has got; for all other ranks of a node."""
        while True:
            found = _decoded(self._wait(f"node/{first_rank}"), _RosterPointer)
            if found is not None and self._is_of_now(found.process):
                roster = self._wait(f"roster/{found.roster}")
                return msgspec.msgpack.decode(roster, type=Roster)
            if not self._patience.sleep():
                raise self._timed_out()

    def _is_of_now(self, process: str) -> bool:
        return is_running(process) or (self._is_once and not is_in_sight(process))

    # -- how the leader gathers ---------------------------------------------------------------

    def _gathered(self, known: dict[int, Hello]) -> list[Hello]:
        """Return the hellos of all nodes in the order of their ranks, waiting for new ones."""
        gathered: list[Hello] = []
        rank = 0
        while rank < self._num_ranks:
            while rank not in known:
                hello = self._hello(rank)
                if hello is not None:
                    known[rank] = hello
                    self._patience.renew()
                elif not self._patience.sleep():
                    raise self._timed_out()
            gathered.append(known[rank])
            rank += known[rank].num_local_ranks
        return gathered

    def _hello(self, rank: int) -> Hello | None:
        data = self._place.try_get(f"{self._key}/hello/{rank}")
        hello = None if data is None else _decoded(data, Hello)
        if hello is None or hello.num_ranks != self._num_ranks:
            return None
        return hello if rank + hello.num_local_ranks <= self._num_ranks else None

    def _newer_hello(self, name: str, roster: Roster) -> Hello | None:
        """Wait until all have acknowledged: return None, or the new hello of a node."""
        missing = {hello.rank: hello for hello in roster.hellos[1:]}
        while missing:
            for rank, hello in list(missing.items()):
                if self._place.try_get(f"{self._key}/acknowledged/{name}/{rank}") is not None:
                    del missing[rank]
                    self._patience.renew()
                    continue
                newer = self._hello(rank)
                if newer is not None and newer.number != hello.number:
                    return newer
            if missing and not self._patience.sleep():
                raise self._timed_out(frozenset(hello.number for hello in missing.values()))
        return None

    # -- keys ---------------------------------------------------------------------------------

    def left_overs(self, roster: Roster) -> tuple[str, ...]:
        """Return the prefixes of the keys that nobody needs after the run.

        These are only keys with random names. Hellos have the same names in the next run, which may
        have begun already.
        """
        own = [f"{part}/{self._roster}" for part in ("roster", "end", "acknowledged")]
        own += [f"answer/{hello.number}" for hello in roster.hellos]
        return tuple(f"{self._key}/{key}" for key in own) if self._roster else ()

    def _tell_node(self, rank: int, hello: Hello, name: str) -> None:
        if hello.num_local_ranks > 1:
            found = _RosterPointer(process=hello.process, roster=name)
            self._put(f"node/{rank}", msgspec.msgpack.encode(found))

    def _put(self, key: str, value: bytes) -> None:
        self._place.put(f"{self._key}/{key}", value)

    def _wait(self, key: str) -> bytes:
        value = wait_for(self._place, f"{self._key}/{key}", self._patience)
        if value is None:
            raise self._timed_out()
        self._patience.renew()
        return value

    def _timed_out(self, gone: frozenset[str] = frozenset()) -> RendezvousError:
        """Return an error that says who has come and who has not."""
        there = [hello for hello in self._hellos() if hello.number not in gone]
        lacking = ", ".join(_ranks(*gap) for gap in self._gaps(there))
        names = ", ".join(map(str, there[:8])) or "nobody"
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        return RendezvousError(
            f"the nodes did not come together within {show_seconds(self._patience.timeout_s)} at "
            f"{self._key}: {lacking or 'no ranks'} did not come, {names}{more} did; start all "
            f"{self._num_ranks} ranks of the job, numbered node by node, or wait for longer"
        )

    def _hellos(self) -> Iterator[Hello]:
        rank = 0
        for _ in range(_HELLOS_SOUGHT_MAX):
            if rank >= self._num_ranks:
                return
            hello = self._hello(rank)
            if hello is not None:
                yield hello
            rank += 1 if hello is None else hello.num_local_ranks

    def _gaps(self, there: list[Hello]) -> Iterator[tuple[int, int]]:
        end = 0
        for hello in there:
            if hello.rank > end:
                yield end, hello.rank
            end = hello.rank + hello.num_local_ranks
        if end < self._num_ranks:
            yield end, self._num_ranks


def _decoded(data: bytes, kind: type[T]) -> T | None:
    """Return a value, or None if another version of Penstock has left other bytes there."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None


def new_hello(
    *, rank: int, num_local_ranks: int, num_ranks: int, record: NodeRecord, digest: dict[str, str]
) -> Hello:
    """Return a hello with a random number."""
    return Hello(
        number=secrets.token_hex(16),
        rank=rank,
        num_local_ranks=num_local_ranks,
        num_ranks=num_ranks,
        record=record,
        digest=digest,
        process=process_mark(),
    )


def _ranks(start: int, end: int) -> str:
    return f"rank {start}" if end == start + 1 else f"ranks {start}-{end - 1}"
