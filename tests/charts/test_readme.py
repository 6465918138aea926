"""The chart's README names every value, with what it does."""

from __future__ import annotations

import re

import yaml
from chart import CHART

README = (CHART / "README.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([\w.]+)` \| `.*?` \| (.*) \|$", README, re.MULTILINE))
PLAIN = {"replicas", "resources", "tolerations", "affinity", "podLabels", "podAnnotations", "labels"}
"""Values whose name is Kubernetes' own, and says it."""


def leaves(values, path=()):
    for name, below in values.items():
        here = (*path, name)
        if isinstance(below, dict) and below and name not in {"resources", "nodeSelector", "labels"}:
            yield from leaves(below, here)
        else:
            yield ".".join(here)


def test_every_value_is_there_and_explained():
    assert set(ROWS) == set(leaves(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))))
    unexplained = {name for name, text in ROWS.items() if not text and name.rpartition(".")[2] not in PLAIN}
    assert not unexplained


def test_it_is_packed_with_the_chart(helm, tmp_path):
    done = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.iterdir()
    shown = helm.run("show", "readme", str(archive))
    assert shown.stdout.strip() == README.strip()
