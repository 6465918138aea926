"""The sources that wheels carry as machine code avoid what mypyc changes the meaning of without a word."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import tomllib
from pathlib import Path

import pytest
from msgspec import Struct

import carpool
import carpool_cli
import carpool_operator
import carpool_sidecar
from carpool.policy.plain import FrozenCamel, MutableCamel

ROOT = Path(__file__).parents[2]
MODULES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["hooks"]["custom"]["modules"]

pytestmark = pytest.mark.pure


@pytest.fixture(params=MODULES)
def module(request):
    return importlib.import_module(request.param)


@pytest.fixture
def tree(module):
    return ast.parse(inspect.getsource(module))


def structs(module):
    kinds = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return [each for each in kinds if issubclass(each, Struct)]


def test_structs_inherit_what_their_keywords_say(module):
    for kind in structs(module):
        (base,) = kind.__bases__
        plain = type(base)("Plain", (base,), {}).__struct_config__
        options = [name for name in dir(plain) if not name.startswith("_")]
        told = [(name, getattr(kind.__struct_config__, name)) for name in options if name != "tag"]
        assert told == [(name, getattr(plain, name)) for name in options if name != "tag"], kind


def test_fields_that_are_renamed_are_so_by_a_base(module):
    # What is in JSON under another name, `__struct_config__` does not say.
    for kind in structs(module):
        (base,) = kind.__bases__
        plain = type(base)("Plain", (base,), {"__annotations__": dict.fromkeys(kind.__struct_fields__, object)})
        assert kind.__struct_encode_fields__ == plain.__struct_encode_fields__, kind


def test_types_of_fields_that_are_read_keep_what_stands_in_brackets(module, tree):
    names = {kind.__name__ for kind in structs(module) if issubclass(kind, FrozenCamel | MutableCamel)}
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and each.name in names:
            for field in each.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.annotation, ast.Subscript):
                    outer = field.annotation.value
                    decoded = isinstance(outer, ast.Name) and outer.id in {"dict", "list", "tuple", "set", "frozenset"}
                    assert not decoded, f"{module.__name__}.{each.name}.{ast.unparse(field)}: put its type in quotes"


def test_no_class_that_stays_python_derives_from_one_that_does_not():
    # With the wheel its first instance raises "interpreted classes cannot inherit from compiled". Not so of structs.
    found = []
    for package in (carpool, carpool_sidecar, carpool_operator, carpool_cli):
        for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if name in MODULES or name.endswith("__main__"):
                continue
            for kind in vars(importlib.import_module(name)).values():
                if isinstance(kind, type) and kind.__module__ == name:
                    found += [kind for base in kind.__bases__ if base.__module__ in MODULES and type(base) is type]
    assert not found, "list their modules in pyproject.toml, too"


def test_no_slice_object_is_an_index(module, tree):
    for each in ast.walk(tree):
        if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Call):
            assert ast.unparse(each.slice.func) != "slice", f"{module.__name__}: {ast.unparse(each)}"


def test_a_name_is_of_one_type_of_exception_in_a_function(module, tree):
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            caught = [each for each in ast.walk(function) if isinstance(each, ast.ExceptHandler) and each.name]
            for name in {each.name for each in caught}:
                types = {ast.unparse(each.type) for each in caught if each.name == name}
                assert len(types) == 1, f"{module.__name__}.{function.name}: {name} is one of {types}"
