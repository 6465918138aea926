from __future__ import annotations

import click
import msgspec
import pytest

from carpool.policy.parameters import Parameters
from carpool_cli import options
from carpool_cli.options import (
    ADDRESS,
    DIMS,
    DURATION,
    OUTPUT_FILE,
    PICTURE_FILE,
    SHAPE,
    SOME_TIME,
    Address,
    FiniteRange,
    need,
)


def test_durations_are_seconds():
    assert DURATION.convert("50ms", None, None) == 0.05
    assert DURATION.convert(2, None, None) == 2.0
    assert DURATION.convert("7.433ms", None, None) == pytest.approx(0.007433)
    for wrong in ("7.4", "1.s", "1.5x", "-1.5s"):
        with pytest.raises(click.BadParameter, match="not a duration"):
            DURATION.convert(wrong, None, None)


def test_a_time_that_may_not_be_none_says_so():
    assert SOME_TIME.convert("1us", None, None) == 1e-6
    with pytest.raises(click.BadParameter, match="longer than 0s"):
        SOME_TIME.convert("0s", None, None)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://a:9000", Address("a", 9000, "")),
        ("a", Address("a", 80, "")),
        (":9000", Address("127.0.0.1", 9000, "")),
        ("http://[::1]:9000", Address("::1", 9000, "")),
        ("127.0.0.1:9/x/", Address("127.0.0.1", 9, "/x")),
    ],
)
def test_addresses(text, address):
    assert ADDRESS.convert(text, None, None) == address


@pytest.mark.parametrize(
    "text", ["https://a", "http://", "http://a:b", "http://a?b", ":x", "http://[::1", "http://a:99999"]
)
def test_wrong_addresses(text):
    with pytest.raises(click.BadParameter):
        ADDRESS.convert(text, None, None)


def test_an_address_is_read_as_it_is_written():
    for url in ("http://127.0.0.1:9000/x", "http://[::1]:9000"):
        assert str(ADDRESS.convert(url, None, None)) == url


def test_shapes_and_dims():
    assert SHAPE.convert("3,224", None, None) == (3, 224)
    assert DIMS.convert("sequence=128", None, None) == ("sequence", 128)
    for kind, texts in ((SHAPE, ("3,x", "0", ",")), (DIMS, ("=3", "a=b", "a=²", "a=0"))):
        for text in texts:
            with pytest.raises(click.BadParameter):
                kind.convert(text, None, None)


def test_what_is_missing_names_its_extra():
    with pytest.raises(click.ClickException, match=r"pip install '\.\[onnx\]'"):
        need("no_such_module", "onnx")


def test_an_output_needs_its_folder_before_any_work_is_done(tmp_path):
    assert OUTPUT_FILE.convert(str(tmp_path / "out"), None, None) == tmp_path / "out"
    with pytest.raises(click.BadParameter, match="make it first"):
        OUTPUT_FILE.convert(str(tmp_path / "none" / "out"), None, None)
    with pytest.raises(click.BadParameter, match="is a directory"):
        OUTPUT_FILE.convert(str(tmp_path), None, None)


def test_a_picture_is_of_a_known_format_before_any_work_is_done(tmp_path):
    assert PICTURE_FILE.convert(str(tmp_path / "a.SVG"), None, None) == tmp_path / "a.SVG"
    for name in ("a.docx", "a"):
        with pytest.raises(click.BadParameter, match=r"end it with \.png, \.svg, \.pdf"):
            PICTURE_FILE.convert(str(tmp_path / name), None, None)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "x"])
def test_a_number_is_finite_and_within_its_bounds(text):
    assert FiniteRange(0).convert("1e3", None, None) == 1000.0
    with pytest.raises(click.BadParameter):
        FiniteRange(0).convert(text, None, None)


@pytest.mark.parametrize(
    ("option", "field"), [(options.max_batch, "max_batch"), (options.max_in_flight, "max_in_flight")]
)
def test_an_option_takes_what_the_field_of_a_configuration_takes(option, field):
    command = click.command()(option()(lambda **_: None))
    fields = {each.name: each.type for each in msgspec.inspect.type_info(Parameters).fields}
    taken = command.params[0].type
    assert (taken.min, taken.max) == (fields[field].ge, fields[field].le)
