from __future__ import annotations

import json
import logging

import pytest

from carpool_sidecar.config.settings import parse
from carpool_sidecar.config.watching import ConfigFile


def text(p99="50ms", **fields):
    return json.dumps({"upstream": {"url": "http://h:1"}, "policy": {"slo": {"latency": {"p99": p99}}}, **fields})


@pytest.fixture
def watched(tmp_path):
    path = tmp_path / "sidecar.yaml"
    path.write_text(text())
    seen = []
    file = ConfigFile(path, parse(text()), seen.append, logging.getLogger("test"))
    return path, file, seen


def test_a_new_version_is_reported_once_with_the_next_generation(watched):
    path, file, seen = watched
    file.look()
    assert (seen, file.generation) == ([], 1)
    path.write_text(text("70ms"))
    file.look()
    file.look()
    assert [config.policy.slo.due for config in seen] == [0.07]
    assert file.generation == 2


def test_a_version_that_comes_while_the_model_is_loaded_is_not_overlooked(tmp_path):
    path = tmp_path / "sidecar.yaml"
    path.write_text(text("70ms"))
    seen = []
    file = ConfigFile(path, parse(text("50ms")), seen.append, logging.getLogger("test"))
    file.look()
    assert [config.policy.slo.due for config in seen] == [0.07]
    assert file.generation == 2


def test_a_file_may_count_its_own_generations(watched):
    path, file, _ = watched
    path.write_text(text("70ms", generation=12))
    file.look()
    assert file.generation == 12


@pytest.mark.parametrize("bad", ["", "{", text("soon"), text(listen="127.0.0.1:1"), "\x00", text(what=1)])
def test_a_wrong_version_changes_nothing_and_is_named(watched, bad, caplog):
    path, file, seen = watched
    path.write_text(bad)
    file.look()
    file.look()
    assert (seen, file.generation, file.rejected) == ([], 1, 1)
    assert file.error
    assert caplog.records[-1].error == file.error
    path.write_text(text("80ms"))
    file.look()
    assert (len(seen), file.generation, file.error) == (1, 2, None)


def test_a_file_that_is_no_text_or_not_there_is_wrong_too(watched):
    path, file, seen = watched
    path.write_bytes(b"\xff\xfe\x00")
    file.look()
    assert (file.rejected, file.error) == (1, "byte 1 is not UTF-8: save the file as UTF-8")
    path.unlink()
    file.look()
    assert (file.rejected, seen) == (2, [])


def test_a_configmap_changes_by_a_swap_of_links(tmp_path):
    for name, p99 in (("one", "50ms"), ("two", "60ms")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sidecar.yaml").write_text(text(p99))
    (tmp_path / "..data").symlink_to("one")
    path = tmp_path / "sidecar.yaml"
    path.symlink_to("..data/sidecar.yaml")
    seen = []
    file = ConfigFile(path, parse(text()), seen.append, logging.getLogger("test"))
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    file.look()
    assert [config.policy.slo.due for config in seen] == [0.06]
