"""Load for a person at a cluster: ``cluster-load SERVICE RATE``, a line each second, until Ctrl-C or its end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from minicluster.api import Api
from minicluster.traffic import Traffic

BODY = json.dumps({"instances": [[0.5, 1.5]]}).encode()


def main() -> None:
    """Send requests to a Service's ready endpoints and say how they fare."""
    parser = argparse.ArgumentParser(prog="cluster-load", description=__doc__)
    parser.add_argument("service")
    parser.add_argument("rate", type=float, help="requests a second")
    parser.add_argument("--path", default="/v1/models/standin:predict")
    parser.add_argument("--namespace", default="default")
    asked = parser.parse_args()
    kubeconfig = Path(os.environ["KUBECONFIG"])
    with (
        suppress(KeyboardInterrupt),
        closing(Api.of(kubeconfig)) as api,
        Traffic(api, asked.service, asked.namespace, asked.path, BODY, rate=asked.rate) as traffic,
    ):
        while kubeconfig.exists():
            began = time.monotonic()
            time.sleep(1.0)
            latest = [one for one in list(traffic.answers) if one.at >= began]
            if len(latest) > 1:
                p50, *_, p99 = statistics.quantiles((one.seconds for one in latest), n=100)[49:]
                counts = Counter(one.outcome for one in latest)
                outcomes = ", ".join(f"{count}x {what}" for what, count in counts.items())
                endpoints = len({one.endpoint for one in latest})
                sys.stdout.write(f"{outcomes}; p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms, {endpoints} pods\n")
        # The cluster is gone, and its state with it: nobody is left to answer what is under way.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
