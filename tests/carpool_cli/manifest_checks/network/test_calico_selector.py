"""Calico's selectors; expressions and results as its own parser's tests have them."""

from __future__ import annotations

import pytest

from carpool_cli.manifest_checks.network.calico_selector import matches

LABELS = {"app": "web", "tier": "front-end", "example.com/team": "a"}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", True),
        ("all()", True),
        ("global()", False),
        ("app == 'web'", True),
        ('app=="web"', True),
        ("app == 'other'", False),
        ("app != 'other'", True),
        ("missing != 'other'", True),
        ("missing == 'other'", False),
        ("has(app)", True),
        ("has( example.com/team )", True),
        ("!has(app)", False),
        ("! has(missing)", True),
        ("app in {'web', \"api\"}", True),
        ("app in {'api'}", False),
        ("app in {}", False),
        ("app not in {'api'}", True),
        ("app notin {'web'}", False),
        ("app notin{'api'}", True),
        ("tier startswith 'front'", True),
        ("tier endswith 'front'", False),
        ("notin notin {'x'} && !has(startswith)", True),
        ("startswith startswith 'x'", False),
        ("app not  in {'web'}", False),
        ("missing not in {'web'}", True),
        ("tier starts with 'front'", True),
        ("tier ends with 'end'", True),
        ("tier contains 't-e'", True),
        ("missing contains ''", False),
        ("app == 'web' && tier == 'back'", False),
        ("app == 'web' || tier == 'back'", True),
        ("app == 'x' && tier == 'y' || has(app)", True),
        ("app == 'x' && (tier == 'y' || has(app))", False),
        ("!(app == 'x') && !!has(app)", True),
        ("all( )", True),
        ("in-cluster == 'x' || contains/it == 'y'", False),
        ("notin {'x'}", None),
        ("app == web", None),
        ("app = 'web'", None),
        ("app == 'web' &&", None),
        ("(app == 'web'", None),
        ("app == 'web' tier == 'y'", None),
        (f"{'(' * 100}app == 'web'{')' * 100}", True),
        (f"{'(' * 101}app == 'web'{')' * 101}", None),
        (f"{'!' * 100}has(app)", True),
        (f"{'!' * 101}has(app)", None),
        (" || ".join(["(app == 'x')"] * 200), False),
    ],
)
def test_a_selector_is_read_as_calico_reads_it(selector, expected):
    if expected is None:
        with pytest.raises(ValueError, match=r"selector|quotes|label"):
            matches(selector, LABELS)
    else:
        assert matches(selector, LABELS) is expected


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ("pcsa.role == 'x'", LABELS, None),
        ("has(pcsa.role)", LABELS, None),
        ("!(pcsa.role == 'x')", LABELS, None),
        ("pcsa.role in {'x'} && app == 'web'", LABELS, None),
        ("pcsa.role in {'x'} && app == 'other'", LABELS, False),
        ("pcsa.role in {'x'} || app == 'web'", LABELS, True),
        ("app == 'other' || pcsa.role in {'x'}", LABELS, None),
        ("role == 'x'", None, None),
        ("all()", None, True),
        ("", None, True),
    ],
)
def test_what_goes_by_labels_that_are_not_known_is_not_known(selector, labels, expected):
    assert matches(selector, labels) is expected
