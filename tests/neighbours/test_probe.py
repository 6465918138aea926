"""What `neighbours.probe` reports of a server whose work is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from neighbours import probe
from processes import Process, free_port

SERVER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
work = float(sys.argv[2])
while True:
    connection, _ = listener.accept()
    while connection.recv(4096):
        end = time.process_time() + work
        while time.process_time() < end:
            pass
        time.sleep(float(sys.argv[3]))
        connection.sendall(sys.argv[4].encode() + b"\\r\\n\\r\\n")
"""
OK = "HTTP/1.1 200 OK"

pytestmark = pytest.mark.real


def probed(work, pause, status=OK):
    port = free_port()
    with Process([sys.executable, "-c", SERVER, str(port), str(work), str(pause), status], port) as server:
        return probe.probe(port, server.pid, 0.6)


def test_cpu_time_before_an_answer_is_seen():
    _, cpu = probed(0.2, 0.0)
    assert cpu > 0.15


def test_time_without_work_costs_nothing_but_is_a_gap():
    gap, cpu = probed(0.0, 0.2)
    assert gap > 0.2
    assert cpu < 0.1


def test_an_answer_that_is_no_yes_is_a_gap():
    gap, _ = probed(0.0, 0.0, "HTTP/1.1 503 No")
    assert gap >= 0.6


def test_nobody_there_is_a_gap():
    gap, cpu = probe.probe(free_port(), os.getpid(), 0.3)
    assert gap >= 0.3
    assert cpu < 0.2


def test_a_process_that_is_gone_is_a_gap():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    gap, cpu = probe.probe(free_port(), process.pid, 0.3)
    assert (gap >= 0.3, cpu) == (True, 0.0)


def test_waiting_for_a_core_is_counted():
    before = probe.waited()
    time.sleep(0.01)
    assert probe.waited() >= before
