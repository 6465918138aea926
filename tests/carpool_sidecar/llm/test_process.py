from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
import sys

import pytest

from carpool.policy.durations import Duration
from carpool.policy.plain import PolicyError
from carpool_cli.demo.random_model import SIZES, write
from carpool_sidecar import child_process
from carpool_sidecar.config.settings import Llm
from carpool_sidecar.llm import process, worker_link
from carpool_sidecar.llm.messages import Broken, Cancel, Ready, frame
from carpool_sidecar.llm.process import EngineProcess
from carpool_sidecar.llm.worker_link import CannotLoadError, WorkerLink

LOG = logging.getLogger("carpool")


async def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path):
    write(tmp_path / "m.gguf", SIZES["tiny"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PolicyError, match=r"llm: .*pip install '\.\[llm\]'"):
        EngineProcess(Llm(str(tmp_path / "m.gguf")), LOG)


async def test_a_folder_too_deep_for_a_socket_is_named(monkeypatch, tmp_path):
    write(tmp_path / "m.gguf", SIZES["tiny"])
    config = Llm(str(tmp_path / "m.gguf"))
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "LONGEST_ADDRESS", 4096)  # the tests' own folder may be too deep
    engine = EngineProcess(config, LOG)
    longest = len(engine.upstream.address[2])
    engine.close()
    monkeypatch.setattr(process, "LONGEST_ADDRESS", longest)
    EngineProcess(config, LOG).close()
    monkeypatch.setattr(process, "LONGEST_ADDRESS", longest - 1)
    with pytest.raises(PolicyError, match=r"llm: .*/carpool-engine-12345678/engine.sock: set TMPDIR"):
        EngineProcess(config, LOG)


async def test_an_engine_that_nobody_has_leaves_no_folder(monkeypatch, tmp_path):
    """As where another part of a sidecar can't be made, after its engine."""
    write(tmp_path / "m.gguf", SIZES["tiny"])
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(folder))
    monkeypatch.setattr(process, "LONGEST_ADDRESS", 4096)  # the tests' own folder may be too deep
    engine = EngineProcess(Llm(str(tmp_path / "m.gguf")), LOG)
    assert [*folder.iterdir()]
    with pytest.warns(ResourceWarning):
        del engine
    assert not [*folder.iterdir()]


async def test_an_engine_that_cannot_be_started_is_tried_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.01)
    write(tmp_path / "m.gguf", SIZES["tiny"])
    engine = EngineProcess(Llm(str(tmp_path / "m.gguf")), LOG)
    monkeypatch.setattr(process.sys, "executable", str(tmp_path / "none"))
    task = asyncio.create_task(engine.run())
    async with asyncio.timeout(10):
        while len(caplog.records) < 2 and not task.done():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.close()
    assert "it can't be started: " in caplog.records[1].detail


def test_the_system_takes_a_socket_of_the_longest_path():
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="too long"):
        listener.bind("/" + "x" * process.LONGEST_ADDRESS)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(FileNotFoundError):
        client.connect("/" + "x" * (process.LONGEST_ADDRESS - 1))


def link(script, heard, lost):
    return WorkerLink(Llm("m.gguf"), heard, lost, LOG, (sys.executable, "-c", script))


def ended():
    raise InterruptedError


async def test_messages_of_a_process_are_received_and_its_end_is_reported():
    heard = []
    with pytest.raises(InterruptedError):
        await link(f"import sys; sys.stdout.buffer.write({frame(Ready(1, 2))!r})", heard.append, ended).run()
    assert heard == [Ready(1, 2)]


async def test_every_field_reaches_the_process():
    config = Llm("m.gguf", name="llama", threads=2, timeout=Duration(90.0))
    script = (
        "import sys; from carpool_sidecar.config.settings import Llm; "
        "from carpool_sidecar.llm.messages import Broken, frame; "
        "sys.stdout.buffer.write(frame(Broken(repr(Llm.of_argument(sys.argv[1])))))"
    )
    with pytest.raises(CannotLoadError) as caught:
        await WorkerLink(config, print, print, LOG, (sys.executable, "-c", script)).run()
    assert str(caught.value) == repr(config)


async def test_a_model_that_does_not_load_is_not_tried_again():
    script = (
        "import sys; from carpool_sidecar.llm.messages import Broken, frame; "
        "sys.stdout.buffer.write(frame(Broken('no such thing')))"
    )
    with pytest.raises(CannotLoadError, match="no such thing"):
        await link(script, print, print).run()


async def test_a_process_that_hangs_is_ended_and_one_that_answers_pings_is_not(monkeypatch):
    monkeypatch.setattr(worker_link, "LEAST", 0.4)
    config = Llm("m.gguf", max_batched_tokens=1, timeout=Duration(0.4))
    script = (
        "import os, time\n"
        "from carpool_sidecar.llm.messages import Pong, Ready, frame\n"
        "time.sleep(1)\n"  # to load takes longer than a step may
        "os.write(1, frame(Ready(1, 2)))\n"
        "for _ in range(8):\n"
        "    os.read(0, 100)\n"
        "    os.write(1, frame(Pong()))\n"
        "time.sleep(60)\n"
    )
    heard, began = [], asyncio.get_running_loop().time()
    with pytest.raises(InterruptedError):
        await WorkerLink(config, heard.append, ended, LOG, (sys.executable, "-c", script)).run()
    assert heard == [Ready(1, 2)]
    assert 1.8 < asyncio.get_running_loop().time() - began < 30


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 256),
        ({"max_batched_tokens": 8192}, 600),
        ({"max_batched_tokens": 8192, "timeout": Duration(5.0)}, 60),
        ({"max_batched_tokens": 16}, 60),
    ],
)
def test_how_long_a_step_may_take(fields, seconds):
    assert WorkerLink(Llm("m.gguf", **fields), print, print, LOG)._longest_step == seconds


async def test_a_model_that_did_load_is_tried_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.01)
    (tmp_path / "says").write_bytes(frame(Ready(1, 2)))
    heard = []

    def lost():
        (tmp_path / "says").write_bytes(frame(Ready(3, 4)) if caplog.records[1:] else frame(Broken("no memory")))
        if len(heard) == 2:
            ended()

    script = f"import sys; sys.stdout.buffer.write(open({str(tmp_path / 'says')!r}, 'rb').read())"
    with pytest.raises(InterruptedError):
        await link(script, heard.append, lost).run()
    assert heard == [Ready(1, 2), Ready(3, 4)]
    assert "no memory" in [getattr(record, "detail", "") for record in caplog.records]


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff....", b"\x03\0\0\0abc"])
async def test_what_is_no_reply_ends_it(said):
    script = f"import sys, time; o = sys.stdout; o.buffer.write({said!r}); o.flush(); time.sleep(60)"
    with pytest.raises(InterruptedError):
        await link(script, print, ended).run()


async def test_what_is_sent_without_a_process_is_dropped():
    none = link("", print, print)
    none.send(Cancel(1))
    assert none.pid is None
