"""Calico's selectors: ``app == 'web' && tier in {'a', 'b'}``, parsed as by ``libcalico-go/lib/selector``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>(?:all|global)\(\s*\)|has\(\s*[\w./-]+\s*\))"""
    r"""|(?P<sign>==|!=|&&|\|\||[!(){},])|(?P<text>"[^"]*"|'[^']*')|(?P<label>[\w./-]+))""",
    re.ASCII,
)
_OPERATOR = re.compile(r"\s*(?:(not)\s*(in)|(starts|ends)\s*(with)|(in|contains))(?![\w./-])", re.ASCII)
"""Words that are operators after a label, and labels elsewhere."""

_COMPARED: Mapping[str, Callable[[str | None, str], bool]] = {
    "==": lambda value, text: value == text,
    "!=": lambda value, text: value != text,
    "contains": lambda value, text: value is not None and text in value,
    "starts with": lambda value, text: value is not None and value.startswith(text),
    "ends with": lambda value, text: value is not None and value.endswith(text),
}

DEEPEST = 100
"""Deepest nesting of parentheses and negations that is read; nobody writes more by hand."""

OF_SERVICE_ACCOUNT = "pcsa."
"""Prefix for labels of a pod's service account, which are not read here."""


def matches(selector: str, labels: Mapping[str, str] | None) -> bool | None:
    """Whether a selector matches these labels; an empty one matches all.

    ``labels``: None if unknown. Returns None if the result is unknown then. Raises ``ValueError`` for an invalid
    selector, or one nested deeper than ``DEEPEST``.
    """
    tokens = _tokens(selector)
    if not tokens:
        return True
    found = _either(tokens, labels, 0)
    if tokens:
        raise ValueError(f"unexpected {tokens[0]} in selector {selector!r}")
    return found


def _tokens(selector: str) -> list[str]:
    """Return the tokens of a selector, with runs of blanks inside them reduced to one."""
    found, place, text, behind_label = [], 0, selector.rstrip(), False
    while place < len(text):
        if behind_label and (operator := _OPERATOR.match(text, place)) is not None:
            found.append(" ".join(word for word in operator.groups() if word))
            place, behind_label = operator.end(), False
            continue
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError(f"unexpected {text[place:]} in selector {selector!r}")
        word = token["word"] and re.sub(r"\s+", "", token["word"])
        found.append(token["text"] or word or token["sign"] or token["label"])
        place, behind_label = token.end(), token["label"] is not None
    return found


def both(first: bool | None, second: bool | None) -> bool | None:
    """Whether both are true; None if unknown."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def negated(one: bool | None) -> bool | None:
    """Return the negation; None if unknown."""
    return None if one is None else not one


def _either(tokens: list[str], labels: Mapping[str, str] | None, depth: int) -> bool | None:
    found = _all(tokens, labels, depth)
    while tokens and tokens[0] == "||":
        tokens.pop(0)
        found = negated(both(negated(found), negated(_all(tokens, labels, depth))))
    return found


def _all(tokens: list[str], labels: Mapping[str, str] | None, depth: int) -> bool | None:
    found = _one(tokens, labels, depth)
    while tokens and tokens[0] == "&&":
        tokens.pop(0)
        found = both(found, _one(tokens, labels, depth))
    return found


def _one(tokens: list[str], labels: Mapping[str, str] | None, depth: int) -> bool | None:
    """Evaluate one comparison, negated or in parentheses, and remove it from the tokens."""
    if depth > DEEPEST:
        raise ValueError(f"a selector is nested more than {DEEPEST} deep")
    token = _next(tokens)
    if token == "!":  # noqa: S105 - a sign, no secret
        return negated(_one(tokens, labels, depth + 1))
    if token == "(":  # noqa: S105 - as above
        found = _either(tokens, labels, depth + 1)
        _expect(tokens, ")")
        return found
    if token == "all()":  # noqa: S105 - as above
        return True
    if token == "global()":  # noqa: S105 - as above
        return False
    if token.startswith("has("):
        return token[4:-1] in labels if labels is not None and _is_known(token[4:-1]) else None
    known = labels is not None and _is_known(token)
    found = _compared(tokens, None if labels is None else labels.get(token))
    return found if known else None


def _is_known(label: str) -> bool:
    return not label.startswith(OF_SERVICE_ACCOUNT)


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
