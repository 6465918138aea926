from __future__ import annotations

import json
import re

import pytest

import reference
from carpool_cli.main import COMMANDS
from carpool_operator.injector.reasons import REASONS, Reason, Skip
from carpool_sidecar.config.settings import SidecarConfig
from carpool_sidecar.tuning.decisions import KEPT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    monkeypatch.setattr(reference, "SHOWN", ())  # its command takes seconds
    return tmp_path


def test_what_was_written_is_up_to_date(folder):
    assert reference.main([]) == 0
    assert {path.name for path in folder.iterdir()} == set(reference.PAGES)
    assert reference.main(["--check"]) == 0


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_behind_the_code_is_shown_and_fails(folder, name, capsys):
    reference.main([])
    path = folder / name
    path.write_text(path.read_text() + "by hand\n")
    assert reference.main(["--check"]) == 1
    shown = capsys.readouterr()
    assert "-by hand" in shown.out
    assert "make docs" in shown.err


def test_a_missing_page_fails(folder, capsys):
    reference.main([])
    (folder / "api.md").unlink()
    assert reference.main(["--check"]) == 1
    assert "+# HTTP" in capsys.readouterr().out


def test_every_field_is_in_the_configuration_with_its_values():
    text = reference.config()
    for name in SidecarConfig.__struct_encode_fields__:
        assert f"| `{name}` |" in text
    assert "| `policy.admission.maxQueuedBytes` | size | `256Mi` |" in text
    assert "| `policy.models[].axis` | `Auto`, `First`, `None` | `Auto` |" in text
    assert "| `parameters.NAME.maxBatch` | integer 1 to 65536 | `32` |" in text
    assert "| `policy.tuning.riskier.maxFactor` | number over 1, to 16 | `2.0` |" in text
    assert "| `upstream.url` | text | required |" in text


def test_every_command_is_among_the_commands():
    text = reference.commands()
    assert re.findall(r"^## carpool (\S+)$", text, re.MULTILINE) == list(COMMANDS)
    assert "## carpool-sidecar\n" in text
    assert max(map(len, text.splitlines())) <= reference.WIDTH + 25  # epilogues are printed as they stand


def test_figures_stand_beside_their_limits(tmp_path, monkeypatch):
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    limit = {"name": "Batcher", "value": 6, "goal": 5, "unit": "us", "direction": "at most", "why": ""}
    (tmp_path / "benchmarks" / "limits.json").write_text(json.dumps([limit]))
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert "`make bench` has not been run" in reference.benchmarks()
    bench = {
        "commit": "abc", "date": "2026-11-21", "command": "python run.py", "skipped": {"pass-through": "no nginx"},
        "machine": {"cpu": "a CPU", "cores": 2, "system": "Linux", "python": "3.11"},
        "figures": [{"name": "Batcher", "value": 5.5, "trials": 9, "parts": {"arrive": 2.25}}],
    }  # fmt: skip
    row = {
        "scenario": "load doubles", "rate": 812.4, "best": "batch 64", "found": "batch 48", "goodput_share": 0.998,
        "saving_share": 0.9, "misses": 0.001, "flips": 0, "settled_at": 31.0,
    }  # fmt: skip
    (tmp_path / "benchmarks" / "results" / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "benchmarks" / "results" / "convergence.json").write_text(
        json.dumps(
            {"commit": "def", "date": "2026-11-20", "command": "conv.py", "rows": [row, row | {"saving_share": None}]}
        )
    )
    text = reference.benchmarks()
    assert "Commit abc, 2026-11-21, 2 cores of a CPU,\nLinux, Python 3.11; `python run.py`." in text
    assert "| Batcher | 5.5 | at most 6 | 5 | us | arrive 2.25 |" in text
    assert "Skipped: pass-through, no nginx" in text
    assert "`conv.py` at commit def, 2026-11-20: virtual time" in text
    assert "| load doubles | 812 | batch 64 | batch 48 | 99.8% | 90% | 0.10% | 0 | 31 s |" in text
    assert "| load doubles | 812 | batch 64 | batch 48 | 99.8% |  | 0.10% | 0 | 31 s |" in text


PAGE = """Before.

```bash
carpool simulate --profile {profile} --slo-p99 50ms --rate 50 --for 2s --compare
```

<!-- its output -->
```text
no batching: as it was long ago
```

After.
"""


@pytest.mark.parametrize("folder", ["", ".venv/bin/"])
def test_what_commands_print_is_brought_up_to_date(folder):
    profile = reference.ROOT / "benchmarks" / "profiles" / "synthetic-5-0.5.json"
    text = PAGE.format(profile=profile).replace("carpool simulate", f"{folder}carpool simulate")
    before, _, after = text.partition("no batching: as it was long ago")
    page = reference.shown(before + "no batching: as it was long ago" + after)
    assert page.startswith(before)
    assert page.endswith(after)
    assert re.search(r"^no batching: batch 1, wait 0s, 1 in flight +\d", page, re.MULTILINE)


def test_the_header_of_a_table_may_change():
    profile = reference.ROOT / "benchmarks" / "profiles" / "synthetic-5-0.5.json"
    page = PAGE.format(profile=profile).replace("no batching: as it was long ago", "p50 of long ago\nno batching: x")
    assert re.search(r"^ +p50 +p99 +goodput", reference.shown(page), re.MULTILINE)


def test_the_reasons_that_no_pod_shows_come_first():
    assert "but never with one of the first four" in reference.injection()
    untold = [reason for reason in REASONS if reason is Reason.SELF_TUNED or not Skip(reason, "").is_annotated]
    assert untold == [*REASONS][:4]


def test_every_row_has_a_name():
    assert [name for name in ("policy.md", "config.md") if "\n| `` |" in reference.PAGES[name]()] == []


def test_headers_that_the_sidecar_adds_are_named():
    text = reference.api()
    assert all(f"`{name}`" in text for name in ("x-carpool-batch-size", "x-carpool-queue-ms", "x-carpool-debug"))


def test_how_many_decisions_a_sidecar_remembers_is_named():
    assert f"| List the last {KEPT} decisions" in reference.api()
    assert f"the sidecar remembers {KEPT}" in " ".join(reference.commands().split())
