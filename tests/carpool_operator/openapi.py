"""What a structural schema refuses, as far as Carpool's goes: for tests without a server."""

from __future__ import annotations

import re

KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def faults(value, schema, path=""):
    """Yield what is wrong, with its path."""
    alternatives = [{**schema, **each} for each in schema.get("anyOf", ())]
    for each in alternatives:
        del each["anyOf"]
    if alternatives:
        if all(list(faults(value, each, path)) for each in alternatives):
            yield f"{path}: {value!r} is none of what it may be"
        return
    # JSON's true is no number, Python's is.
    if not isinstance(value, KINDS[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        yield f"{path}: {value!r} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from (f"{path}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            if "additionalProperties" in schema:
                yield from faults(inner, schema["additionalProperties"], f"{path}.{name}")
            elif name not in schema["properties"]:
                yield f"{path}.{name}: unknown"
            else:
                yield from faults(inner, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9):
            yield f"{path}: {len(value)} entries"
        keys = schema.get("x-kubernetes-list-map-keys", [])
        told_apart = [tuple(each.get(key) for key in keys) for each in value] if keys else []
        if len(set(told_apart)) < len(told_apart):
            yield f"{path}: two entries with the same {keys}"
        for index, each in enumerate(value):
            yield from faults(each, schema["items"], f"{path}[{index}]")
    elif isinstance(value, str):
        if "enum" in schema and value not in schema["enum"]:
            yield f"{path}: {value!r} is none of {schema['enum']}"
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            yield f"{path}: {value!r} does not match"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9):
            yield f"{path}: {len(value)} characters"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        least, most = schema.get("minimum", -1e18), schema.get("maximum", 1e18)
        if not least <= value <= most or (schema.get("exclusiveMinimum") and value == least):
            yield f"{path}: {value} is not in {least} to {most}"


def filled(value, schema):
    """Return a value with the defaults that a server fills in."""
    if isinstance(value, dict) and "properties" in schema:
        defaults = {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner}
        return {name: filled(inner, schema["properties"][name]) for name, inner in {**defaults, **value}.items()}
    return [filled(each, schema["items"]) for each in value] if isinstance(value, list) else value
