"""The command in real network namespaces: who is led where."""

from __future__ import annotations

import sys

import pytest

POD, POD_6 = "10.99.0.2", "fd99::2"
COMMAND = (sys.executable, "-m", "carpool_sidecar.capture.main")


@pytest.fixture
def captured(pod, caller):
    pod.serve(model=8000, sidecar=14080)
    assert caller.ask((POD, 8000), (POD_6, 8000)) == ["model", "model"]
    pod.run(*COMMAND, "8000=14080", "14081=8000")
    return caller


def test_callers_from_outside_get_the_sidecar_over_either_family(captured):
    assert captured.ask((POD, 8000), (POD_6, 8000)) == ["sidecar", "sidecar"]
    assert captured.ask((POD, 14080), (POD_6, 14080)) == ["sidecar", "sidecar"]


def test_probes_get_the_model(captured):
    assert captured.ask((POD, 14081), (POD_6, 14081)) == ["model", "model"]


def test_inside_the_pod_nothing_is_led_elsewhere_so_the_sidecar_never_calls_itself(captured, pod):
    addresses = [(host, 8000) for host in ("127.0.0.1", "::1", POD, POD_6)]

    assert pod.ask(*addresses) == ["model"] * 4


def test_other_ports_stay_as_they_are(captured, pod):
    pod.serve(metrics=8002)

    assert captured.ask((POD, 8002), (POD_6, 8002)) == ["metrics", "metrics"]


def test_run_again_it_replaces_what_it_did(captured, pod):
    pod.serve(other=9000)
    pod.run(*COMMAND, "9000=14080")

    assert captured.ask((POD, 9000), (POD, 8000), (POD, 14081)) == ["sidecar", "model", "ConnectionRefusedError"]


def test_callers_answers_come_from_the_port_that_they_called(captured):
    # The client's socket is connected to 8000: an answer from 14080 would be another connection's.
    assert captured.ask(*[(POD, 8000)] * 20) == ["sidecar"] * 20


@pytest.mark.parametrize(("flags", "code"), [((), 1), (("--optional",), 0)])
def test_without_the_right_it_changes_nothing_and_says_what_is_needed(pod, caller, flags, code):
    pod.serve(model=8000, sidecar=14080)

    done = pod.run("setpriv", "--bounding-set=-net_admin", *COMMAND, *flags, "8000=14080", check=False)

    assert done.returncode == code
    assert "NET_ADMIN" in done.stderr
    assert caller.ask((POD, 8000)) == ["model"]


def test_net_admin_alone_suffices(pod, caller):
    pod.serve(model=8000, sidecar=14080)

    pod.run("setpriv", "--bounding-set=-all,+net_admin", "--no-new-privs", *COMMAND, "8000=14080")

    assert caller.ask((POD, 8000)) == ["sidecar"]
