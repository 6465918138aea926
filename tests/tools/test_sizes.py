from __future__ import annotations

from sizes import wrong

LONG = "def long():\n" + "    print()\n" * 61
MANY = "class Many:\n    def __init__(self):\n" + "".join(f"        self.a{number} = 0\n" for number in range(13))


def write(folder, text):
    (folder / "one.py").write_text(text)
    return folder


def test_what_is_too_large_is_named(tmp_path):
    assert wrong(write(tmp_path, LONG), {}) == ["one.py: long has 62 lines; at most 60"]
    assert wrong(write(tmp_path, MANY), {}) == ["one.py: Many has 13 attributes; at most 12"]


def test_what_is_listed_may_shrink_and_not_grow(tmp_path):
    folder = write(tmp_path, LONG)
    assert wrong(folder, {("one.py", "long: function lines"): 62}) == []
    assert wrong(folder, {("one.py", "long: function lines"): 61}) == ["one.py: long has 62 lines; at most 61"]


def test_what_is_listed_without_need_has_to_leave_the_list(tmp_path):
    (told,) = wrong(write(tmp_path, "def long():\n    print()\n"), {("one.py", "long: function lines"): 62})
    assert told == "one.py: long has 2 lines: take it off the list in tools/sizes.py"
    (told,) = wrong(write(tmp_path, ""), {("one.py", "long: function lines"): 62})
    assert "there is no long" in told


def test_the_core_has_a_limit_of_lines(tmp_path):
    assert wrong(write(tmp_path, LONG), {("one.py", "long: function lines"): 62}, lines=10) == [
        "the core has 62 lines; at most 10, and the goal is 5,500"
    ]


def test_the_core_keeps_its_limits():
    assert wrong() == []
