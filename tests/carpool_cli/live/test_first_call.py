from __future__ import annotations

import json

import pytest

from carpool_cli.live.first_call import curl_line, example
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


def test_nobody_there_gets_none():
    assert curl_line(ADDRESS.convert("127.0.0.1:9", None, None), ["m"]) is None
