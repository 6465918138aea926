"""`carpool savings` of what a real Prometheus scraped from a real sidecar, against what sidecar and device counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from itertools import pairwise
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from carpool_cli.planning import history
from carpool_cli.planning.prometheus import ask

pytestmark = pytest.mark.real

PATIENCE, PAUSE, SINCE = 60.0, 0.1, 60
INTERVAL = 0.2
"""Seconds between two scrapes."""

SECONDS = {1: 0.02, 2: 0.024, 4: 0.032, 8: 0.048}
"""Batch latency: 16 ms + 4 ms per row."""

BUSY = "carpool_device_busy_seconds_total"


def asked(url):
    with urlopen(url, timeout=10) as response:  # noqa: S310 - our own processes on 127.0.0.1
        return response.read()


def until(test):
    """Return what a test answers once that is true: it is asked ``PATIENCE / PAUSE`` times at most."""
    for _ in range(round(PATIENCE / PAUSE)):
        try:
            if found := test():
                return found
        except URLError:
            pass
        time.sleep(PAUSE)
    pytest.fail("it never came")


@contextmanager
def prometheus(program, folder, admin):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    labels = {"namespace": "shop", "pod": "standin-0"}
    scrapes = [{"job_name": "carpool", "static_configs": [{"targets": [admin], "labels": labels}]}]
    config, scrape = folder / "prometheus.yml", f"{INTERVAL * 1000:.0f}ms"
    config.write_text(
        json.dumps({"global": {"scrape_interval": scrape, "scrape_timeout": scrape}, "scrape_configs": scrapes})
    )
    process = subprocess.Popen(  # noqa: S603 - Prometheus
        [
            program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ],
        env={**os.environ, "GOMAXPROCS": "1"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def test_savings_are_of_the_device_seconds_that_were_counted(program, launched, standing_in, carpool, tmp_path):
    profile = tmp_path / "device.json"
    document = {"name": "device", "source": "synthetic", "executors": 1}
    profile.write_text(json.dumps({**document, "rows": list(SECONDS), "seconds": list(SECONDS.values())}))
    fixed = ("--fixed", "--max-batch", 8, "--max-wait", "0s", "--max-in-flight", 1)
    with (
        standing_in(profile) as device,
        launched("--upstream", device, "--slo-p99", "500ms", *fixed) as up,
        prometheus(program("prometheus"), tmp_path, up.admin.removeprefix("http://")) as url,
    ):

        def answer(metric):
            return json.loads(asked(f"{url}/api/v1/query?query={metric}"))["data"]["result"]

        def value(metric):
            found = answer(metric)
            return found[0]["value"][1] if found else None

        # 1. It scrapes before the first request, so that nothing is missing in what it adds up.
        until(lambda: value(BUSY) == "0")
        done = carpool("bench", up.data, "--rate", 40, "--requests", 600, "--warm-up", "0s")
        assert done.exit_code == 0, done.output
        counted = json.loads(asked(f"{up.admin}/v1/stats"))["stats"]["deviceBusy"]
        until(lambda: float(value(BUSY)) == counted)
        # 2. Over the whole time: the report is per hour.
        questions = history.questions(SINCE)
        ranges, ends = ask(url, questions, SINCE, time.time())
        (past,) = history.pasts(questions, ranges, ends)
        scraped, arrivals = ({at for at, _ in ranges[name][0].values} for name in ("scraped", "arrivals"))
        assert arrivals <= scraped, "there is no count without a scrape"
        assert past.counted.device_seconds / 3600 * questions.step * len(past.load) == pytest.approx(counted, rel=0.02)
        shown = carpool("savings", "--prometheus", url, "--since", f"{SINCE}s", "--gpu-hour", 2, "--json")
        # Where Prometheus has a minute of the day: the load of that minute, not of a day's step of three minutes.
        began = float(value("min(min_over_time(timestamp(carpool_arrivals_total)[10m:1s]))"))
        least = time.time() - began
        day = carpool("savings", "--prometheus", url, "--since", "1d", "--json")
        most = time.time() - began
        (samples,) = answer("carpool_arrivals_total[10m]")
        computed = json.loads(asked(f"{device}/stats"))["batches"]
    # 3. The sidecar counts no less than the device took: the batches, each times its latency.
    assert counted >= 0.98 * sum(count * (0.016 + 0.004 * int(rows)) for rows, count in computed.items())
    # 4. The command shows the same pod.
    assert shown.exit_code == 0, shown.output
    assert day.exit_code == 0, day.output
    (of_day,) = json.loads(day.output)["workloads"]
    # increase() can't know of requests before the first scrape that has the series, nor when requests came without
    # scrapes at the edge of a step. On a machine that pauses, both may be a second.
    counts = [(at, float(count)) for at, count in samples["values"]]
    lost = counts[0][1]
    lost += sum(more - less for (at, less), (after, more) in pairwise(counts) if after - at > 2 * INTERVAL)
    assert (0.95 * 600 - lost) / most <= of_day["rate"] <= 1.05 * 600 / least
    (workload,) = json.loads(shown.output)["workloads"]
    ways = {way["name"]: way for way in workload["ways"]}
    assert workload["name"] == past.name == "shop/standin"
    assert list(ways)[:3] == ["as counted", "no batching", "zero wait"]
    assert (ways["as counted"]["replicas"], ways["as counted"]["money"]) == (1.0, pytest.approx(2 * 730))
