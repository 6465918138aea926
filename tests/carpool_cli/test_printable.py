from __future__ import annotations

import pytest

from carpool_cli.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("caf\xe9 \u65e5 [b] \\x", "caf\xe9 \u65e5 [b] \\x"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\x9b\u202e\udc80", r"a\nb\x9b\u202e\udc80"),
    ],
)
def test_what_a_terminal_acts_on_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
