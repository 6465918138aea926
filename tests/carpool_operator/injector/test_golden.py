"""Each file of golden/injector_*.yaml: what is admitted, and behind the second --- what becomes of it.

``UPDATE_GOLDEN=1 pytest`` writes the second halves anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.webhook.review import judge
from carpool_sidecar.config.settings import parse

SETTINGS = InjectorSettings(image="carpool-sidecar:test", version="test", public_key="ab" * 32)
DRAIN_KEY = "0123456789abcdef"
CASES = sorted((Path(__file__).parent / "golden").glob("injector_*.yaml"))


def admit(thing):
    request = {"uid": "u", "kind": {"kind": thing["kind"]}, "namespace": "models", "object": thing}
    return judge(request, SETTINGS, DRAIN_KEY).changed


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem.removeprefix("injector_"))
def test_golden(path):
    given, _, wanted = path.read_text().partition("\n---\n")
    thing = yaml.safe_load(given)
    changed = admit(thing)
    if "UPDATE_GOLDEN" in os.environ:
        wanted = yaml.safe_dump(changed, sort_keys=False, width=118)
        path.write_text(f"{given.rstrip()}\n---\n{wanted}")
    assert changed == yaml.safe_load(wanted)
    assert admit(changed) == changed  # injected again, by a second round of webhooks
    assert yaml.safe_load(given) == thing  # what was given is left alone
    for container in changed["spec"].get("initContainers", []):
        if container["name"] == "carpool":
            config = container["env"][0]["value"].replace("$$", "$")
            read = parse(config)  # by the sidecar's own reader
            assert (read.drain_key, read.public_key) == (DRAIN_KEY, SETTINGS.public_key)
            assert json.loads(config)["upstream"]["url"] == read.upstream.url
