"""The operators' page on the metrics port: `/ui`, read-only, off with `metrics.ui = false`.

A browser loads four static files and then asks these endpoints, which scripts may use as well
(GET and HEAD; all answer JSON; times are Unix seconds, null = not known):

* `/ui/api/fleet`: `time`, `version`, `role`, `not_ready` ("" = ready), `lag` (feed entries),
  `index` {`blocks`, `entries`, `bytes`}, `scoring` {`requests`, `per_second`, `hit_ratio`,
  `latency_ms`}, `left_off` (ranks beyond the first 2,000) and `workers`, one object per rank:
  `worker_id`, `dp_rank`, `namespace`, `model`, `address`, `role`, `owner`, `state`, `detail`,
  `evidence_ms` (since the last batch or heartbeat), `lag_ms` (of the last batch), `epoch`, `seq`,
  `blocks` {tier: n}, `events_per_second` (over the last ten seconds), `gaps`, `lost_batches`,
  `restarts`, `orphans`, `filtered`, `dropped`, `picks`, `hit_ratio` (expected of its picks).
  Rebuilt at most once a second, however many ask.
* `/ui/api/history?since=N`: `next` (pass it as the next `since`), `interval` (seconds) and lists of
  equal length `time`, `events` (per second), `lag_ms` (mean), `hit_ratio` (best worker's, of scored
  prompts), `pick_ratio` (expected of picks), `requests` (per second), `latency_ms` (mean). The last
  ten minutes are kept.
* `/ui/api/worker?worker_id=ID&dp_rank=R&namespace=NS`: `worker` (as in the fleet), `registration`,
  `groups`, `counters`, `history` {`time`, `events`, `lag_ms`} of the last five minutes.
* `POST /ui/api/explain`, `Content-Type: application/json`, at most 1 MiB; it changes nothing:
  one of `text`, `token_ids` (list) and `body` (an object, with `path`, `/v1/chat/completions` by
  default); and `model`, `namespace`, `lora_name`, `cache_salt`, `candidates`, `top_k` (1 to 50,
  by default 10), `include_stale` (true). The answer has `prompt_tokens`; `divergence` (null, or
  where the prompt leaves the index: `held_tokens`, `before_token`, `detail`, `unknown`, and
  `variations` {`detail`, `matched_tokens`, `workers`}); and `workers`, best first: `worker_id`,
  `dp_rank`, `address`, `state`, `block_size`, `reusable_tokens`, `matched_tokens`,
  `device_tokens`, `host_tokens`, `storage_tokens`, `predicted_tokens`, `upper_bound`, `cost`,
  `reason`, and `groups` {`idx`, `kind`, `block_size`, `window`, `stops_at`, `why`, `held`}: `held`
  is a list of pairs (0 missing, 1 device, 2 host, 3 storage, 4 predicted; number of blocks).

An error is `{"error": "...", "code": "..."}` with the gRPC status as code. Nothing here waits for
Redis, and nothing holds the event loop for more than a few milliseconds.
"""

from kvindexd.ui.pages import Ui

__all__ = ["Ui"]
