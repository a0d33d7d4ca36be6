"""An eager model and its optimizer, unmodified, with a schedule under its own training loop.

The parameters of a model lie one behind another in `arenas`: flat memory for gradients and weights.

* parameter – as the model has it; a *segment* of an arena
* unit – neighbouring parameters, about 8 ms of the network: what one collective carries
* share – the part of each unit that this rank owns, updates and keeps states for
* slice, run – the elements of one parameter, or of neighbouring ones, that lie in this share
* block – the parameters of a group of layers, which `reshard` gathers and releases together

The modules, in the order of a step:

* `attach` – the entry, and what users call; `fit` refuses what cannot be attached; `one_rank`
* `record`, `plan`, `blocks` – the first step is watched; one plan, decided once on all ranks
* `hooks`, `grads`, `released_grads`, `guarded_grads` – gradients, from a hook to their arena and
  back to whoever reads them
* `flow` – gradients and weights between the ranks; `streams`, `stream_updates`, `stream_rounds` are
  the same on a GPU
* `share`, `update`, `elementwise`, `optimizers`, `slices` – the update of this rank's share by the
  user's own optimizer; `scaling` – with a GradScaler
* `step_exchange` – what ranks tell each other once a step
* `pending_weights`, `module_weights`, `released_params`, `reshard` – who waits for weights, and
  weights that are whole only while they are used
* `shared_arenas`, `device` – lanes and memory, by device and by who shares memory
* `checkpoint`, `state`, `sharded`, `peer_slices`, `process_end` – saving and loading, alone or
  together
"""
