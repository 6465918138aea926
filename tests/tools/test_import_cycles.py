from __future__ import annotations

from import_cycles import ALLOWED, groups, main, wrong


def test_modules_that_import_each_other_are_a_group():
    imports = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["f"], "f": ["g"], "g": ["e"]}
    assert groups(imports) == [["b", "c"], ["e", "f", "g"]]


def test_a_cycle_is_wrong_unless_it_is_allowed():
    imports = {"a": ["b"], "b": ["a"]}
    assert wrong(imports, []) == ["import cycle: a, b: move what they share to a module below them"]
    assert wrong(imports, [("b", "a")]) == []


def test_an_allowance_without_a_cycle_is_wrong():
    imports = {"a": ["b"], "b": []}
    assert wrong(imports, [("b", "a")]) == ["b -> a closes no cycle: take it out of ALLOWED"]


def test_the_project_has_no_other_cycles(capsys):
    assert main() == 0, capsys.readouterr().out
    assert all(ALLOWED.values())
