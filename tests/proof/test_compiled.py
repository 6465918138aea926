from __future__ import annotations

import os
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from shutil import which

import compiled
import pytest
from compared import played

COMPILER = which((os.environ.get("CC") or sysconfig.get_config_var("CC")).split()[0])
HEADER = Path(sysconfig.get_paths()["include"]) / "Python.h"


@pytest.mark.skipif(COMPILER is None or not HEADER.exists(), reason="no C compiler, or none for Python, is here")
def test_machine_code_does_the_same_to_the_last_bit():
    with process(str(compiled.folder())) as machine, process(None) as sources:
        assert machine.submit(compiled.is_used).result()
        assert not sources.submit(compiled.is_used).result()
        for each in [
            ("synthetic-1-executor", "carpool"),
            ("bert-base-t4-lengths", "carpool"),
            ("resnet50-t4-noisy-bursty", "carpool"),
            ("four-replicas-slow-pod", "half-slo"),
            ("llama-decode-memory", "fixed-32-5ms"),
        ]:
            results = [one.submit(played, *each) for one in (machine, sources)]
            assert results[0].result() == results[1].result()


def process(machine_code):
    return ProcessPoolExecutor(1, get_context("spawn"), compiled.use, (machine_code,))


def test_a_missing_compiler_is_reported_with_the_packages_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(compiled, "MODULES", ("nowhere",))
    with pytest.raises(compiled.NotCompiledError, match="apt-get install gcc python3-dev"):
        compiled.folder()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_can_not_be_written_is_reported(monkeypatch):
    monkeypatch.setattr(compiled, "FOLDER", compiled.Path("/proc/nowhere"))
    with pytest.raises(compiled.NotCompiledError, match="/proc/nowhere can't be written"):
        compiled.folder()
