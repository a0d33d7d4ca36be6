"""Flow: what moves where and when, one event at a time.

Pure: no clock, thread, socket or file. Everything that decides how bytes move is here, and
everything that drives it is elsewhere: `engine` for real, `simulate` in virtual time. Start with
`flow.Flow`, which takes events and returns actions.

* `events` – what can happen, and what is to be done
* `flow` – which fetch begins when, and from where
* `residency` – which units a tier keeps where units come and go (importance orders)
* `stage` – who may use memory next; `pace` – when a step is needed, and how far to plan ahead
* `planning` – whether to plan another batch, or to fill tiers ahead
* `routes`, `holders` – which route a sample's bytes take; which nodes have them
* `filling` – in which order tiers are filled ahead, and how far that has come
* `reading` – which gaps to read, which blocks to read whole, how long to wait for others' claims
* `worker_count` – how many worker processes there should be
* `live` – a machine as a run observes it
* `source`, `limit`, `tail`, `hedge` – a source's requests in flight, its latency, second copies;
  `requests` – what is remembered of each fetch; `budget` – the limits that a flow is made with
* `layout` – where every sample lies on the nodes of a job; `bound`, `cost` – the fewest bytes that
  must be read, and what a read costs
* `choice`, `fallback` – which sources a fetch has; when the next of them is asked
"""

from penstock.flow.budget import FlowBudget, SourcePrior
from penstock.flow.events import (
    Action,
    Arrived,
    Begin,
    Consumed,
    Deferred,
    Event,
    Failed,
    Fetch,
    GiveUp,
    Throttled,
    Tick,
    Waiting,
    Wanted,
)
from penstock.flow.flow import Flow, FlowRates
from penstock.flow.source import SourceRates

__all__ = [
    "Action",
    "Arrived",
    "Begin",
    "FlowBudget",
    "Consumed",
    "Deferred",
    "Event",
    "Failed",
    "Fetch",
    "Flow",
    "FlowRates",
    "GiveUp",
    "SourcePrior",
    "SourceRates",
    "Throttled",
    "Tick",
    "Waiting",
    "Wanted",
]
