"""What the documentation names exists: pages, anchors, metrics, codes."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pages import ROOT, WRITTEN

from carpool.batching.requests import Refused
from carpool.exchange.decision import Reason
from carpool_cli.live.unbatched import OF_REQUESTS
from carpool_cli.main import COMMANDS
from carpool_operator.api.status import DEFECTS
from carpool_operator.reporting import metrics as operator_metrics
from carpool_sidecar.admin.metrics import METRICS
from carpool_sidecar.admin.signatures import Reason as Refusal
from carpool_sidecar.http1.client.errors import FailureKind, UpstreamError

LINK = re.compile(r"\]\(([^)\s]+)\)")
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def anchors(page):
    """Anchors of a page's headings, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*WRITTEN, *REFERENCE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text("utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_metrics_that_are_named_exist():
    known = {re.sub(r"_total$", "", metric.name) for metric in METRICS}
    known |= {f"operator_{metric.name}" for metric in operator_metrics.METRICS}
    known |= {metric.name.removeprefix("carpool_") for metric in operator_metrics.OF_POLICIES}
    known.add("load")  # an external metric, as the examples' adapter names it
    for page in WRITTEN:
        for name in re.findall(r"\bcarpool_(?!cli\b|sidecar\b|operator\b)[a-z0-9_]+", page.read_text("utf-8")):
            plain = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert plain.removeprefix("carpool_") in known or plain in known, f"{page.name}: {name}"


def test_commands_that_are_named_exist():
    for page in WRITTEN:
        for command in re.findall(r"^(?:\.venv/bin/)?carpool ([a-z]\w*)", page.read_text("utf-8"), re.MULTILINE):
            assert command in COMMANDS, f"{page.name}: carpool {command}"


def test_every_code_that_people_meet_is_explained():
    pages = {
        "docs/tuning.md": list(Reason),
        "docs/admission.md": [
            *Refused,
            *(UpstreamError(kind, "", answered_bytes=False).reason for kind in get_args(FailureKind)),
        ],
        "docs/protocols.md": reasons(),
        "docs/troubleshooting.md": cluster_reasons(),
    }
    for page, codes in pages.items():
        text = (ROOT / page).read_text("utf-8")
        missing = [code for code in codes if f"`{code}`" not in text]
        assert not missing, f"{page}: {missing}"


_ALONE = (
    r'\balone\(endpoint, facts, body, "([a-z-]+)"',
    r'^ +reason(?:: ClassVar\[str\])? = "([a-z-]+)"$',
    r'\balone(?:_by_protocol)? = (?:[\w.]+ or |None if .* else )?"([a-z-]+)"',
    r'^ +return "([a-z-]+)"$',
)


def reasons():
    """Reasons not to be batched, as the code writes them."""
    found = set()
    for name in ("models.py", "protocols/v1.py", "protocols/v2.py", "protocols/tensors.py", "protocols/json_scan.py"):
        text = (ROOT / "sidecar" / "carpool_sidecar" / name).read_text("utf-8")
        for pattern in _ALONE:
            found |= set(re.findall(pattern, text, re.MULTILINE))
    return sorted(found)


def test_the_command_line_explains_every_reason_of_requests_themselves():
    of_models = {code for code in reasons() if code.startswith("axis-")} | {"quarantined", "too-many-models"}
    assert {*reasons()} - {*OF_REQUESTS} <= of_models


_OF_A_POLICY = (
    r'Finding\(\s*(?:TRUE|FALSE|UNKNOWN),\s*"([A-Za-z]+)"',
    r'Blind\("([A-Za-z]+)"',
    r'_happenings\.note\(\s*"[A-Za-z]+",\s*[\w.]+,\s*"([A-Za-z]+)"',
    r'_fail\([^"\n]*"([A-Z][A-Za-z]+)"',
    r'Event\(\s*(?:warning=)?True,\s*"([A-Za-z]+)"',
)


def cluster_reasons():
    """Reasons of conditions, decisions and events, and of changes that sidecars refuse, as the code writes them."""
    found = {*get_args(Refusal), *DEFECTS}
    for path in (ROOT / "operator" / "carpool_operator").rglob("*.py"):
        text = path.read_text("utf-8")
        for pattern in _OF_A_POLICY:
            found |= set(re.findall(pattern, text, re.MULTILINE))
    return sorted(found)


def test_the_reasons_of_policies_are_found():
    assert {"NotInjected", "NoPodsReady", "SidecarRolledBack", "CanaryPromoted", "AnnotationInvalid", "older"} <= {
        *cluster_reasons()
    }


def test_the_reasons_not_to_be_batched_are_found():
    assert {
        "axis-none", "axis-unknown", "too-many-models", "encoded", "mixed-rows", "sequence", "scalar", "malformed",
        "limits", "surrogates", "empty", "large-integers",
    } <= {*reasons()}  # fmt: skip
