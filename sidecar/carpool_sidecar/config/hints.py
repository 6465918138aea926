"""What to write in place of a value that the configuration does not take."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain
from carpool.policy.schema import alternatives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Struct

NO_TLS = "TLS is not supported; write the server's plain port, http://host:port, or put a TLS proxy between"

_STEP = re.compile(r"([^.\[\]]+)")

_INSTEAD_OF_BOOLEANS = {
    "passThrough": {True: "Always", False: "Never"},
    "verification": {True: "Automatic", False: "Never"},
    "tuning": {True: "Apply", False: "Hold"},
}
"""Modes that people switch on and off."""

_EXAMPLES = {
    "policy": "policy: {slo: {latency: {p99: 50ms}}}",
    "slo": "slo: {latency: {p99: 50ms}}",
    "url": "url: http://127.0.0.1:9000",
    "path": "path: /models/resnet.onnx",
    "publicKey": "the 64 hex digits of an Ed25519 key; up to 8 keys, with commas between them",
}


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with a file's encoding."""
    return f"byte {error.start + 1} is not UTF-8: save the file as UTF-8"


def explained(found: PolicyError, plain: Any, kind: type[Struct], inner: Mapping[str, type[Struct]]) -> PolicyError:  # noqa: ANN401 - whatever the file holds
    """Return the error with what to write instead.

    ``plain``: what is not taken as a ``kind``. ``inner``: objects in it by field, whose own fields people write one
    level too high.
    """
    field, _, why = str(found).partition(": ")
    if field.startswith("parameters[...]"):
        field = field.replace("[...]", f"[{_first_wrong(plain['parameters'])}]", 1)
    path = _STEP.findall("" if field == "config" else field)
    types = re.match("Expected `([^`]+)`, got `([^`]+)`", why)
    if unknown := re.match("Object contains unknown field `([^`]+)`", why):
        instead = _place(path, unknown[1], kind, inner) or _alike(path, unknown[1], kind)
        why = unknown[0] if instead else why
    elif missing := re.match("Object missing required field `([^`]+)`", why):
        instead = f"write e.g. {_EXAMPLES[missing[1]]}" if missing[1] in _EXAMPLES else ""
    elif types:
        instead = _retyped(path, types[1].split(" | ")[0], _at(plain, path), plain, kind, inner)
        expected = [_in_yaml(one) for one in types[1].split(" | ") if one != "null"]
        why = f"{_in_yaml(types[2])} where {' or '.join(expected)} is expected"
    else:
        instead = _reformed(path, _at(plain, path)) if "matching regex" in why else ""
        why = "not of the right form" if instead else why
    return PolicyError(field, f"{why}: {instead}" if instead else why)


def _retyped(
    path: list[str], expected: str, given: Any, plain: Any, kind: type[Struct], inner: Mapping[str, type[Struct]]  # noqa: ANN401 - whatever the file holds
) -> str:  # fmt: skip
    """Return what to write in place of a value of another type; "" if that is not known."""
    if isinstance(given, dict):
        place = _place(path[:-1], path[-1], kind, inner) if path else ""
        return place or ("write a list, whose entries begin with -" if expected == "array" else "")
    if expected == "array" and isinstance(given, str):
        return f"write {path[-1]}: [{_text(given)}]"
    if expected == "object":
        return _member(path, given, plain, kind)
    if expected == "int":
        return _whole(path, given, plain, kind)
    if expected == "str" and path and path[-1] in {"listen", "admin"}:
        return "write host:port, e.g. 127.0.0.1:8080"
    if isinstance(given, bool):
        return "write it in quotes: YAML takes on, off, yes and no for true and false"
    return "write it in quotes" if expected == "str" and isinstance(given, int | float) else ""


def _reformed(path: list[str], given: Any) -> str:  # noqa: ANN401 - whatever it is
    """Return what to write in place of a text of another form; "" if that is not known."""
    if "batchAcross" in path and isinstance(given, str) and given != given.lower():
        return f"write {given!r} in lower case: {given.lower()}"
    return f"write {_EXAMPLES[path[-1]]}" if path[-1] in _EXAMPLES else ""


_IN_YAML = {
    "object": "a mapping", "array": "a list", "str": "a text", "int": "a whole number", "float": "a number",
    "bool": "true or false", "null": "nothing",
}  # fmt: skip


def _in_yaml(name: str) -> str:
    """Name a type as somebody who writes YAML knows it."""
    return _IN_YAML.get(name, name)


def _member(path: list[str], given: Any, plain: Any, kind: type[Struct]) -> str:  # noqa: ANN401 - whatever it is
    """Return the mapping to write in place of a bare value."""
    if path[:1] == ["upstream"] and isinstance(given, str) and given.startswith("https:"):
        return f"{given!r}: {NO_TLS}"
    if path[:1] == ["parameters"] and len(path) == 2 and path[1] in Parameters.__struct_encode_fields__:
        return f'name a model, or "*" for all: parameters: {{"*": {{{path[1]}: {_text(given)}}}}}'
    value = _INSTEAD_OF_BOOLEANS.get(path[-1], {}).get(given, given) if isinstance(given, bool) else given
    for names in ("p99", "latency.p99", "max", "mode", "url", "path"):
        written: Any = value
        text = _text(value)
        for name in reversed(names.split(".")):
            written, text = {name: written}, f"{{{name}: {text}}}"
        if _is_taken(path, written, plain, kind):
            return f"write {path[-1]}: {text}"
    if path and path[-1] in _EXAMPLES:
        return f"write e.g. {_EXAMPLES[path[-1]]}"
    known = alternatives(kind, ".".join(path))
    return f"its fields are {', '.join(known)}" if known else ""


def _whole(path: list[str], given: Any, plain: Any, kind: type[Struct]) -> str:  # noqa: ANN401 - whatever it is
    """Return the whole number to write in place of a text or a fraction."""
    digits = re.match(r"([0-9]+)\s*%?$", given) if isinstance(given, str) else None
    number = int(digits[1]) if digits else None
    if isinstance(given, float) and 0 < given <= 1 and path[-1].endswith("Percent"):
        number = round(100 * given)
    if number is not None and _is_taken(path, number, plain, kind):
        return f"write {path[-1]}: {number}"
    return ""


def _is_taken(path: list[str], value: Any, plain: Any, kind: type[Struct]) -> bool:  # noqa: ANN401 - whatever it is
    """Whether the configuration takes a value at this place; it may have other problems."""
    changed = copy.deepcopy(plain)
    try:
        _at(changed, path[:-1])[int(path[-1]) if path[-1].isdigit() else path[-1]] = value
        from_plain(changed, kind, what="")
    except PolicyError as error:
        at = _STEP.findall(error.field)
        return at != path[: len(at)] and at[: len(path)] != path
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _alike(path: list[str], name: str, kind: type[Struct]) -> str:
    """Propose fields of this name that lie deeper, or the field here that is spelt most alike; "" if none is."""
    from difflib import get_close_matches  # noqa: PLC0415 - a sidecar that starts does without

    known = alternatives(kind, ".".join(path))
    deeper = [f"{one}.{name}" for one in known if name in alternatives(kind, ".".join((*path, one)))]
    found = deeper or get_close_matches(name, known, n=1)
    return f"did you mean {' or '.join(found)}?" if found else ""


def _place(path: list[str], name: str, kind: type[Struct], inner: Mapping[str, type[Struct]]) -> str:
    """Return where an unknown field belongs, if it is one of another object; else ""."""
    for at, of in inner.items():
        if not path and name in of.__struct_encode_fields__:
            return f"write it under {at}"
        if path == [at] and name in kind.__struct_encode_fields__:
            return f"write it at the top level of the file, beside {at}"
    return ""


def _first_wrong(parameters: dict[str, Any]) -> str:
    # A path through a mapping says [...] for the key: each entry is tried by itself, in the order that failed.
    for name, entry in parameters.items():
        try:
            from_plain(entry, Parameters, what=name)
        except PolicyError:
            return name
    raise AssertionError  # one of them is wrong


def _at(plain: Any, path: list[str]) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return what is written at a path; ``None`` if nothing is."""
    for step in path:
        try:
            plain = plain[int(step) if isinstance(plain, list) else step]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return plain


def _text(value: Any) -> str:  # noqa: ANN401 - whatever it is
    """Return a scalar as YAML has it; a URL in quotes."""
    if isinstance(value, str) and not re.fullmatch(r"[\w.-]+", value):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
