"""Messages between the story and its training processes: a job in, events out, as JSON."""

from __future__ import annotations

import msgspec


class DemoJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one training process."""

    data: str
    """Folder of the shards."""
    checkpoint: str
    """File of the checkpoint; training resumes from it if it exists."""
    save_every: int
    """Steps between checkpoints; 0 saves none."""
    meeting_point: str
    """A file that does not exist yet, where ranks find each other."""
    rank: int
    num_ranks: int
    epochs: int
    global_batch_size: int
    seed: int
    events: int
    """File descriptor to write events to."""


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A process is about to train."""

    rank: int
    first_step: int
    """Steps done before: those of the checkpoint."""
    num_steps: int
    num_parameters: int
    epoch: int
    position: int
    """Samples of that epoch that were delivered before: where the stream begins."""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A process has trained on one batch."""

    rank: int
    step: int
    """Steps done, those of the checkpoint included."""
    loss: float
    right: int
    samples: int
    """Samples in this rank's share of the batch; `right` of them were recognised."""
    samples_total: int
    """Samples that this process was given so far, in `elapsed_s` seconds."""
    elapsed_s: float
    stall_s: float
    decode_s: float
    sources: dict[str, tuple[int, int]]
    """Bytes and reads, by source."""


class RankDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A process has come to the end of the last epoch."""

    rank: int
    hash_total: int
    hash_samples: int
    """The `StreamHash` of all it was given; rank 0 counts those before the checkpoint too."""
    accuracy: float | None
    """On samples that were held out; rank 0 only."""


Event = RankReady | StepDone | RankDone

encode = msgspec.json.Encoder().encode
decode_event = msgspec.json.Decoder(Event).decode
decode_job = msgspec.json.Decoder(DemoJob).decode
