from __future__ import annotations

import copy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from carpool_cli.yaml_edit import edited, load

WRITTEN = """\
# What it is for
kind: Deployment   # a kind
metadata:
  # its name
  name: 'resnet'
  labels: {app: resnet, mode: 0644}
spec:
  template:
    spec:
      containers:
      - name: server   # the model's
        args:
        - |
          one
            two
        # behind the arguments
        ports: [{name: http, containerPort: 9000}]
        empty:
      # the last words
"""


def change(text, turn):
    new = copy.deepcopy(yaml.safe_load(text))
    turn(new)
    changed = edited(text, new)
    assert yaml.safe_load(changed) == new
    return changed


def comments(text):
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def server(plain):
    return plain["spec"]["template"]["spec"]["containers"][0]


CHANGES = {
    "scalar": (lambda plain: plain["metadata"].update(name="other"), "  name: 'other'\n"),
    "flow": (lambda plain: plain["metadata"]["labels"].update(new="x"), "{app: resnet, mode: 0644, new: x}\n"),
    "item in flow": (lambda plain: server(plain)["ports"].append(7), "[{name: http, containerPort: 9000}, 7]\n"),
    "key": (lambda plain: server(plain).update(tty=True), "        empty:\n        tty: true\n"),
    "block": (lambda plain: server(plain).update(a={"b": [1]}), "        a:\n          b:\n          - 1\n"),
    "key behind block text": (lambda plain: server(plain)["args"].append("b"), "            two\n        - b\n"),
    "item": (lambda plain: plain["spec"]["template"]["spec"]["containers"].append({"a": 1}), "\n      - a: 1\n"),
    "gone": (lambda plain: server(plain).pop("ports"), "        # behind the arguments\n        empty:\n"),
    "at the top": (lambda plain: plain.update(status={}), "\nstatus: {}\n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_touched_stays(name):
    turn, expected = CHANGES[name]
    changed = change(WRITTEN, turn)
    assert expected in changed
    assert comments(changed) == comments(WRITTEN)
    assert "mode: 0644" in changed


@pytest.mark.parametrize(
    ("text", "turn", "expected"),
    [
        ("a: 'x'\n", {"a": "y"}, "a: 'y'\n"),
        ('a: "x"  # c\n', {"a": "1, 2"}, 'a: "1, 2"  # c\n'),
        ('{"a": "x", b: [1, 0x2]}', {"a": "y", "b": [1, 2, "3, 4"]}, '{"a": "y", b: [1, 0x2, \'3, 4\']}'),
        ("a: [1, 2, 3 ]\n", {"a": [1]}, "a: [1 ]\n"),
        ("a: {b: 1, c: 2, d: 3}\n", {"a": {"c": 2}}, "a: {c: 2}\n"),
        ("a: {b: 1, c: 2, d: 3}\n", {"a": {"b": 1, "d": 3, "e": {}}}, "a: {b: 1, d: 3, e: {}}\n"),
        ("a: {b: 1, c: 2}\n", {"a": {"b": 1, "e": 3}}, "a: {b: 1, e: 3}\n"),
        ("a: {b: 1}\n", {"a": {}}, "a: {}\n"),
        ("a: {}\n", {"a": {"b": 1}}, "a: {b: 1}\n"),
        ("a: [\n  {b: 1}, # one\n  {b: 2}, # two\n]\n", {"a": [{"b": 1, "c": None}, {"b": 3}, 4]},
         "a: [\n  {b: 1, c: null}, # one\n  {b: 3}, 4, # two\n]\n"),
    ],
)  # fmt: skip
def test_inside_of_braces_and_quotes_all_else_stays(text, turn, expected):
    assert edited(text, turn) == expected


def test_several_in_one_place_come_in_order():
    def turn(plain):
        server(plain)["tty"] = True
        plain["spec"]["template"]["spec"]["volumes"] = [{"name": "v"}]
        plain["spec"]["replicas"] = 2

    assert change(WRITTEN, turn).splitlines()[-6:] == [
        "        empty:",
        "        tty: true",
        "      volumes:",
        "      - name: v",
        "  replicas: 2",
        "      # the last words",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a: &x {b: 1}\nc: *x\n",
        "base: &base {b: 1}\na:\n  <<: *base\n",
        "a:\n- 1\n- 2\n",
        "a: 1\n? b\n: 2\n",
        "a:",
        "a: 'x'",
        "a: >\n  folded\n\n\n",
        "2020-01-01: {}\na: 3\n",
        "a: 1\r\nb: 2\r\n",
        "\ufeffa: 1\n",
    ],
)
def test_odd_ways_to_write_end_with_what_was_wanted(text):
    change(text, lambda plain: plain.update(a={"b": {"c": [1, {"d": None}]}}, e="f"))
    change(text, lambda plain: plain.pop("a"))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab #:-'\n\"{é", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
)
MAPPINGS = st.dictionaries(st.sampled_from("abcd"), PLAIN, min_size=1, max_size=4)


@given(MAPPINGS, MAPPINGS, st.sampled_from([None, False, True]))
def test_anything_becomes_anything(old, new, flow):
    text = yaml.safe_dump(old, default_flow_style=flow, sort_keys=False)
    assert yaml.safe_load(edited(text, new)) == new


@pytest.mark.parametrize("written", ["{a: %s, b: 1}", "anchor: &one {x: 1}\nother: *one\na: %s\nb: 1\n"])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"1234e56"', "1234e56"),
        ('"1e3"', "1e3"),
        ("22:22", "22:22"),
        ("2024-01-02T03:04:05Z", "2024-01-02T03:04:05Z"),
        ("2024-01-02", "2024-01-02"),
        ('"y"', "y"),
        ('"0o7"', "0o7"),
        ("010", 8),
        ("1e3", 1000.0),
        ("y", True),
        ("~", None),
    ],
)
def test_what_is_written_anew_is_to_kubectl_what_it_was(written, text, value):
    old = written % text
    assert load(old)["a"] == value
    new = {**load(old), "b": 2}
    changed = edited(old, new)
    assert load(changed) == new
    if text.startswith('"'):
        assert f"a: {value}" not in changed, "still quoted"
