"""What a node says of itself when a member of a run asks: `penstock cluster` shows it.

Counters only grow; whoever wants a rate looks twice. `held_bytes` and `capacity_bytes` are of all
data sets here. What a run reads from where is known to its ranks only, so it is there as far as
they have told it: `ReadCounts.num_ranks` says how many did. Bytes between two nodes are counted
where they arrive: what a node sent is the sum of what the others say they had from it.
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

# Statuses come from other processes and are kept, so every text and list has a bound.
_Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)]
_Names = Annotated[tuple[_Text, ...], Meta(max_length=8192)]


class TierStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node keeps in one kind of place."""

    kind: Literal["memory", "disk"]
    capacity_bytes: int
    held_bytes: int
    path: str = ""


class ReadCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes came from that ranks of this node have used so far."""

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
    """What ranks of this node had from one other node."""

    peer: _Text
    """Its name."""
    in_bytes: int = 0
    requests: int = 0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one run does on this node."""

    run: _Text = ""
    """Its id, in hexadecimal digits."""
    dataset: _Text = ""
    """Its URI, for people."""
    cursor: int = 0
    """How far the node's part is filled, in positions of the global order."""
    is_filling: bool = False
    reads: ReadCounts = ReadCounts()
    links: Annotated[tuple[LinkStatus, ...], Meta(max_length=LINKS_MAX)] = ()
    suspects: _Names = ()
    """Nodes that do not answer this one at the moment."""
    lost: _Names = ()
    """Nodes that the whole run has given up."""
    log: Annotated[tuple[_Text, ...], Meta(max_length=SENTENCES_MAX)] = ()
    """What happened, in sentences, the last ones."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as it answers."""

    format: int = FORMAT
    name: str
    """Its identity, by which members of a run call it."""
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
    """Requests that wait now for bytes to arrive."""
    num_connections: int = 0
    num_refused: int = 0
    """Handshakes that failed: wrong secret, unknown run."""
    runs: tuple[RunStatus, ...] = ()
    clock_ns: int = 0
    """The node's clock (perf_counter_ns) when it answered, for traces to compare; 0: unknown."""


# The type is prepared here, by one thread: threads that do so at once can end the process.
msgspec.msgpack.Decoder(NodeStatus)


def as_dict(status: NodeStatus) -> dict[str, Any]:
    """Return a status as plain values, to be sent."""
    plain: dict[str, Any] = msgspec.to_builtins(status)
    return plain


def status_of(plain: Any, *, peer: str = "") -> NodeStatus:
    """Return the status that a peer sent; fields of later versions are passed over."""
    try:
        status = msgspec.convert(plain, NodeStatus)
    except msgspec.ValidationError as error:
        raise PeerError(
            f"{peer or 'a node'} sent a status that makes no sense ({error}); does it run another "
            "version of penstock?",
            peer=peer,
            kind="broken",
        ) from error
    if len(status.runs) > RUNS_MAX or any(len(run.links) > LINKS_MAX for run in status.runs):
        raise PeerError(
            f"{peer or 'a node'} sent the status of {len(status.runs)} runs; at most {RUNS_MAX} "
            f"with {LINKS_MAX} links each are read",
            peer=peer,
            kind="broken",
        )
    return status
