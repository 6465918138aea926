#!/usr/bin/env bash
# What to say to a sidecar, by curl. Beside it, in three terminals or with & behind them:
#   carpool standin --profile benchmarks/profiles/synthetic-5-0.5.json --port 9000
#   carpool-sidecar --config examples/carpool-upstream.yaml
#   bash examples/curl.sh
set -euo pipefail
data=${DATA:-127.0.0.1:8080} admin=${ADMIN:-127.0.0.1:9090} model=${MODEL:-standin}

# Ready? (200, or 503 with the reason)
curl -sS "$admin/readyz"

# KServe V1
curl -sS "$data/v1/models/$model:predict" -d '{"instances": [[1.5, 2.5], [3.5, 4.5]]}'; echo

# Open Inference V2, JSON; x-carpool-debug: how many were batched together, and how long this one waited
curl -sSi "$data/v2/models/$model/infer" -H 'x-carpool-debug: 1' \
  -d '{"id": "42", "inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}]}'; echo

# With a deadline of 40 ms: refused (503, 504) rather than answered late
curl -sS "$data/v1/models/$model:predict" -H 'x-request-timeout-ms: 40' -d '{"instances": [[1, 2]]}'; echo

# What it runs with, what it decided and why, and the metrics
curl -sS "$admin/v1/config"
curl -sS "$admin/v1/explain"
curl -sS "$admin/metrics" | grep -E '^carpool_(max_batch|max_wait_seconds|requests_total)'
