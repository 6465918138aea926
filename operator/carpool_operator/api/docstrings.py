"""Docstrings of a class's attributes: for the CRD and for the pages of docs/reference."""

from __future__ import annotations

import ast
import inspect
from functools import cache


@cache
def attribute_texts(cls: type) -> dict[str, str]:
    """Return the docstrings of the attributes of a class and its bases, by name, each on one line.

    They are read from the source code, so only generators use this.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ in {"builtins", "enum", "msgspec", "msgspec._core"}:
            continue
        tree = ast.parse(inspect.getsource(base)).body[0]
        assert isinstance(tree, ast.ClassDef)  # noqa: S101 - it is a class's source
        for one, two in zip(tree.body, tree.body[1:], strict=False):
            match one, two:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    texts[name] = one_line(text)
    return texts


def one_line(text: object) -> str:
    """Put a docstring on one line, its code in single backticks."""
    return " ".join(str(text).split()).replace("``", "`")
