"""Calico's selectors: ``app == 'web' && tier in {'a', 'b'}``, as ``libcalico-go/lib/selector`` reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>(?:all|global)\(\s*\)|has\(\s*[\w./-]+\s*\)|(?:not\s+in|in|contains|starts\s+with|ends\s+with)(?![\w./-]))"""
    r"""|(?P<sign>==|!=|&&|\|\||[!(){},])|(?P<text>"[^"]*"|'[^']*')|(?P<label>[\w./-]+))""",
    re.ASCII,
)

_COMPARED: Mapping[str, Callable[[str | None, str], bool]] = {
    "==": lambda value, text: value == text,
    "!=": lambda value, text: value != text,
    "contains": lambda value, text: value is not None and text in value,
    "starts with": lambda value, text: value is not None and value.startswith(text),
    "ends with": lambda value, text: value is not None and value.endswith(text),
}


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a selector is for something with these labels; an empty one is for all.

    Raises ``ValueError`` where it is none.
    """
    tokens = _tokens(selector)
    if not tokens:
        return True
    found = _either(tokens, labels)
    if tokens:
        raise ValueError(f"unexpected {tokens[0]} in selector {selector!r}")
    return found


def _tokens(selector: str) -> list[str]:
    """Return the parts of a selector, with one blank for many inside them."""
    found, place, text = [], 0, selector.rstrip()
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError(f"unexpected {text[place:]} in selector {selector!r}")
        quoted = token["text"]
        word = token["word"] and re.sub(r"\s+", " ", token["word"]).replace("( ", "(").replace(" )", ")")
        found.append(quoted or word or token["sign"] or token["label"])
        place = token.end()
    return found


def _either(tokens: list[str], labels: Mapping[str, str]) -> bool:
    found = _all(tokens, labels)
    while tokens and tokens[0] == "||":
        tokens.pop(0)
        other = _all(tokens, labels)
        found = found or other
    return found


def _all(tokens: list[str], labels: Mapping[str, str]) -> bool:
    found = _one(tokens, labels)
    while tokens and tokens[0] == "&&":
        tokens.pop(0)
        other = _one(tokens, labels)
        found = found and other
    return found


def _one(tokens: list[str], labels: Mapping[str, str]) -> bool:
    """Evaluate one comparison, negated or in parentheses, and take it off the tokens."""
    token = _next(tokens)
    if token == "!":  # noqa: S105 - a sign, no secret
        return not _one(tokens, labels)
    if token == "(":  # noqa: S105 - as above
        found = _either(tokens, labels)
        _expect(tokens, ")")
        return found
    if token == "all()":  # noqa: S105 - as above
        return True
    if token == "global()":  # noqa: S105 - as above
        return False
    if token.startswith("has("):
        return token[4:-1] in labels
    return _compared(tokens, labels.get(token))


def _compared(tokens: list[str], value: str | None) -> bool:
    sign = _next(tokens)
    if sign in _COMPARED:
        return _COMPARED[sign](value, _text(tokens))
    if sign not in {"in", "not in"}:
        raise ValueError(f"unexpected {sign} after a label")
    _expect(tokens, "{")
    members = set()
    while tokens and tokens[0] != "}":
        members.add(_text(tokens))
        if tokens and tokens[0] == ",":
            tokens.pop(0)
    _expect(tokens, "}")
    return (value in members) == (sign == "in")


def _text(tokens: list[str]) -> str:
    token = _next(tokens)
    if token[0] not in "\"'":
        raise ValueError(f"{token} is not in quotes")
    return token[1:-1]


def _expect(tokens: list[str], sign: str) -> None:
    if _next(tokens) != sign:
        raise ValueError(f"{sign} is missing in a selector")


def _next(tokens: list[str]) -> str:
    if not tokens:
        raise ValueError("a selector ends too early")
    return tokens.pop(0)
