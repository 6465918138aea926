from __future__ import annotations

import importlib.util
import logging
import sys

import pytest

from carpool.policy.durations import Duration
from carpool.policy.plain import PolicyError
from carpool_cli.demo.random_model import SIZES, write
from carpool_sidecar.config.settings import Llm
from carpool_sidecar.llm.messages import Cancel, Ready, frame
from carpool_sidecar.llm.process import EngineProcess
from carpool_sidecar.llm.worker_link import CannotLoadError, WorkerLink

LOG = logging.getLogger("carpool")


async def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path):
    write(tmp_path / "m.gguf", SIZES["tiny"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PolicyError, match=r"llm: .*pip install 'carpool-serving\[llm\]'"):
        EngineProcess(Llm(str(tmp_path / "m.gguf")), LOG)


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


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff....", b"\x03\0\0\0abc"])
async def test_what_is_no_reply_ends_it(said):
    script = f"import sys, time; o = sys.stdout; o.buffer.write({said!r}); o.flush(); time.sleep(60)"
    with pytest.raises(InterruptedError):
        await link(script, print, ended).run()


async def test_what_is_sent_without_a_process_is_dropped():
    none = link("", print, print)
    none.send(Cancel(1))
    assert none.pid is None
