from __future__ import annotations

import json
import shlex

import pytest

from carpool_cli.live.first_call import curl_line, example, wrapped
from carpool_cli.options import ADDRESS


def test_one_row_is_made_up_for_every_datatype_that_json_has():
    inputs = [
        {"name": "a", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "b", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "c", "datatype": "BYTES", "shape": [-1]},
        {"name": "d", "datatype": "BOOL", "shape": [-1, 1]},
    ]
    made = json.loads(example(inputs))["inputs"]
    assert [tensor["shape"] for tensor in made] == [[1, 3], [1, 8], [1], [1, 1]]
    assert [tensor["data"][0] for tensor in made] == [0.5, 1, "hello", True]


@pytest.mark.parametrize("spec", [("FP32", [-1, 3, 224, 224]), ("FP16", [-1, 2])])
def test_what_fits_no_line_is_not_made_up(spec):
    assert example([{"name": "a", "datatype": spec[0], "shape": spec[1]}]) is None


def test_a_server_that_describes_a_model_gets_a_line(echo):
    address = ADDRESS.convert(echo, None, None)
    assert curl_line(address, ["standin"]).startswith(f"curl {echo}/v2/models/standin/infer -d ")


def test_a_name_is_encoded_for_the_url_and_quoted_for_the_shell(nasty):
    with nasty("--model", "\u6a21;b") as url:
        line = curl_line(ADDRESS.convert(url, None, None), ["\u6a21;b"])
    assert line.startswith(f"curl '{url}/v2/models/%E6%A8%A1;b/infer' -d ")


def test_nobody_there_gets_none():
    assert curl_line(ADDRESS.convert("127.0.0.1:9", None, None), ["m"]) is None


BODY = example(
    [
        {"name": "it's, [a] name", "datatype": "FP32", "shape": [-1, 9]},
        {"name": "b", "datatype": "BYTES", "shape": [-1, 2]},
    ]
)
LINE = f"curl http://127.0.0.1:8080/v2/models/m/infer -d {shlex.quote(BODY)}"


@pytest.mark.parametrize("width", [20, 60, 80, 1000])
def test_a_wrapped_line_can_be_pasted_with_the_blanks_that_a_terminal_copies(width):
    lines = wrapped(LINE, width).split("\n")
    assert all(len(line) <= max(width, 50) for line in lines)
    pasted = "\n".join(line.ljust(width) for line in lines)
    assert shlex.split(pasted)[:3] == shlex.split(LINE)[:3]
    assert json.loads(shlex.split(pasted)[3]) == json.loads(BODY)


def test_a_line_without_a_body_stays_whole():
    assert wrapped("curl -i http://127.0.0.1:9090/readyz", 10) == "curl -i http://127.0.0.1:9090/readyz"
