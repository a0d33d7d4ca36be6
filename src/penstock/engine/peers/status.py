"""The status that a node sends to members of a run; `penstock cluster` shows it.

Counters only grow; a rate is the difference of two statuses. `held_bytes` and `capacity_bytes`
cover all data sets of the node. Only the ranks know how many bytes came from which source, so
`ReadCounts` holds the sum of their reports, and `num_ranks` says how many have reported. Traffic
between two nodes is counted by the receiver: the bytes that a node has sent are the sum of what all
others have received from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import PeerError

FORMAT = 1
RUNS_MAX = 256
LINKS_MAX = 4096
SENTENCES_MAX = 64
TEXT_CHARACTERS_MAX = 4096

# Statuses come from other processes and stay in memory, so every text and list has a bound.
_Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_Names = Annotated[tuple[_Text, ...], Meta(max_length=8192)]


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One memory or disk of a node, with all data sets in it."""

    kind: Literal["memory", "disk"]
    capacity_bytes: int
    held_bytes: int
    path: str = ""


class ReadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that ranks of this node have read so far, by source."""

    tier_bytes: int = 0
    """From this node's own tiers."""
    peer_bytes: int = 0
    store_bytes: int = 0
    num_ranks: int = 0
    """How many ranks are counted here."""

    def __add__(self, other: ReadCounts) -> ReadCounts:
        return ReadCounts(
            tier_bytes=self.tier_bytes + other.tier_bytes,
            peer_bytes=self.peer_bytes + other.peer_bytes,
            store_bytes=self.store_bytes + other.store_bytes,
            num_ranks=self.num_ranks + other.num_ranks,
        )


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks of this node have received from one other node."""

    peer: _Text
    """Its name."""
    in_bytes: int = 0
    requests: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one run on this node."""

    run: _Text = ""
    """Its id, in hexadecimal digits."""
    dataset: _Text = ""
    """Its URI, for people."""
    cursor: int = 0
    """The progress mark of the node (`Shelf.progress_mark`)."""
    is_filling: bool = False
    reads: ReadCounts = ReadCounts()
    links: Annotated[tuple[LinkStatus, ...], Meta(max_length=LINKS_MAX)] = ()
    suspects: _Names = ()
    """Nodes that do not answer this node at the moment."""
    lost: _Names = ()
    """Nodes that the whole run goes on without."""
    log: Annotated[tuple[_Text, ...], Meta(max_length=SENTENCES_MAX)] = ()
    """The latest events, as sentences."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node."""

    format: int = FORMAT
    name: str
    """Its identity, which is its name in the list of members."""
    host: str = ""
    carrier: Literal["node", "rank"] = "rank"
    """Who serves: `penstock node`, or the first rank of the node."""
    version: str = ""
    uptime_s: float = 0.0
    is_draining: bool = False
    tiers: tuple[TierStatus, ...] = ()
    served_bytes: int = 0
    served_requests: int = 0
    num_parked: int = 0
    """Requests that wait for units to be filled."""
    num_connections: int = 0
    num_refused: int = 0
    """Handshakes that failed, for instance because of a wrong secret or an unknown run."""
    runs: tuple[RunStatus, ...] = ()
    clock_ns: int = 0
    """The node's clock (perf_counter_ns) when it answered, for traces to compare; 0: unknown."""


# Prepares the type in one thread: msgspec can crash if several threads do so at once.
msgspec.msgpack.Decoder(NodeStatus)


def as_dict(status: NodeStatus) -> dict[str, Any]:
    """Return a status as plain values, for sending."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    return plain


def status_of(plain: Any, *, peer: str = "") -> NodeStatus:
    """Return the status in a peer's answer; fields of later versions are ignored."""
    try:
        status = msgspec.convert(plain, NodeStatus)
    except msgspec.ValidationError as error:
        raise PeerError(
            f"{peer or 'a node'} sent an invalid status ({error}); does it run another "
            "version of penstock?",
            peer=peer,
            kind="broken",
        ) from error
    # Not a bound of the type: the node service lists more runs to root, with the same type.
    if len(status.runs) > RUNS_MAX:
        raise PeerError(
            f"{peer or 'a node'} sent the status of {len(status.runs)} runs; at most {RUNS_MAX} "
            "are read",
            peer=peer,
            kind="broken",
        )
    return status
