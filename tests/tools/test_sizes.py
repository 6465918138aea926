from __future__ import annotations

from sizes import wrong

LONG = "def long():\n" + "    print()\n" * 61
MANY = "class Many:\n    def __init__(self):\n" + "".join(f"        self.a{number} = 0\n" for number in range(13))


def write(folder, text, package="core"):
    folder /= package
    folder.mkdir()
    (folder / "one.py").write_text(text)
    return [folder]


def test_what_is_too_large_is_named_in_every_package(tmp_path):
    core, other = write(tmp_path, LONG), write(tmp_path, MANY, "other")
    assert wrong([*core, *other], {}) == [
        "core/one.py: long has 62 lines; at most 60",
        "other/one.py: Many has 13 attributes; at most 12",
    ]


def test_functions_that_wait_have_the_same_limit(tmp_path):
    assert wrong(write(tmp_path, f"async {LONG}"), {}) == ["core/one.py: long has 62 lines; at most 60"]


def test_what_is_listed_may_shrink_and_not_grow(tmp_path):
    folder = write(tmp_path, LONG)
    assert wrong(folder, {("core/one.py", "long: function lines"): 62}) == []
    assert wrong(folder, {("core/one.py", "long: function lines"): 61}) == [
        "core/one.py: long has 62 lines; at most 61"
    ]


def test_what_is_listed_without_need_has_to_leave_the_list(tmp_path):
    (told,) = wrong(write(tmp_path, "def long():\n    print()\n"), {("core/one.py", "long: function lines"): 62})
    assert told == "core/one.py: long has 2 lines: take it off the list in tools/sizes.py"
    (told,) = wrong(write(tmp_path, "", "other"), {("core/one.py", "long: function lines"): 62})
    assert "there is no long" in told


def test_the_core_has_a_limit_of_lines_and_others_have_none(tmp_path):
    packages = [*write(tmp_path, "\n" * 11), *write(tmp_path, "\n" * 100, "other")]
    assert wrong(packages, {}, lines=10) == ["the core has 11 lines; at most 10, and the goal is 5,500"]
    assert wrong(packages, {}, lines=11) == []


def test_all_packages_keep_their_limits():
    assert wrong() == []
