from __future__ import annotations

from enum import StrEnum

from carpool_operator.api.docstrings import attribute_texts


class Described:
    one: int
    """First, ``code``
    in two lines."""
    none: int


class Derived(Described):
    two: int = 2
    """Second."""


class Colour(StrEnum):
    RED = "Red"
    """Like a rose."""


def test_texts_under_attributes_are_read_with_those_of_the_bases():
    assert attribute_texts(Derived) == {"one": "First, `code` in two lines.", "two": "Second."}
    assert attribute_texts(Colour) == {"RED": "Like a rose."}
