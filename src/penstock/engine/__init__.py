"""The engine makes batches: it plans, fetches, fills and reads tiers, decodes and transforms.

It decides nothing that `order` and `flow` can decide, and it knows nothing of the training loop:
`loader` hands the finished batches over. README.md tells the life of a batch. Start with
`engine.Engine`.

* `engine`, `options`, `opening`, `build` – a loader's options become open tiers and runs
* Plan: `stream` – which samples each batch has; `job` – a batch in the making; `drawing`,
  `draw_summary` – draws by importance
* Read ahead: `staging`, `stage_reads`, `stages` – what is read for a job, and where its bytes then
  are; `fetcher` – reads begin when the flow says so; `block_cache` – unpacked blocks
* Fill tiers: `local_tiers`, `fills`, `fill_planner`, `cache_hits`, `tier_residency`
* Work: `runner` – the threads of a run; `gather`, `columnar`, `decode`, `worker_maker` – the four
  makers of batches; `reads`, `page_cache` – local files; `assemble`, `sinks`, `cuts`, `convert` –
  fields become arrays; `buffers` – memory that is used again
* Processes: `process` – the engine in its own; `spawner`, `workers`, `worker`, `work`,
  `worker_reads`, `worker_number` – workers; `messages`, `channel`, `shared`, `process_errors`,
  `fetch_answers` – what travels between them
* Other nodes: `joining`, `cluster`, `shared_members`, `peer_reads`, `serving`. `peers` carries the
  requests and knows nothing of the rest of the engine. `node` is `penstock node`: tiers and the
  peer server as a service that jobs share
* Watch: `stats`, `snapshot`, `metrics`, `prometheus`, `web`, `tracing`; `run_context` – what the
  parts of a run share
"""
