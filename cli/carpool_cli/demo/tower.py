"""A wide ranking tower in ONNX, generated here: so many weights that reading them dominates one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from carpool_cli.demo.real_models import RealModel, direct
from carpool_cli.load.servers import request_of
from carpool_cli.profiling.arrays import to_tensors

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 6
BODIES = 64
"""Different requests, sent in turn."""


def model(folder: Path, width: int, rate: float) -> RealModel:
    """Write a tower of six ``width`` x ``width`` float32 layers to a folder; seeded, so always the same."""
    rng = np.random.default_rng(6)
    nodes, weights, layer = [], [], "features"
    for number in range(LAYERS):
        last = number == LAYERS - 1
        weight = rng.standard_normal((width, width), np.float32) * np.float32((2 / width) ** 0.5)
        weights.append(numpy_helper.from_array(weight, f"w{number}"))
        nodes.append(helper.make_node("MatMul", [layer, f"w{number}"], ["scores" if last else f"m{number}"]))
        if not last:
            layer = f"a{number}"
            nodes.append(helper.make_node("Relu", [f"m{number}"], [layer]))
    shape: list[str | int | None] = ["batch", width]
    graph = helper.make_graph(
        nodes,
        "tower",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape)],
        weights,
    )
    path = folder / "tower.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    inputs = [{"features": rng.standard_normal((1, width), np.float32)} for _ in range(BODIES)]
    return RealModel(
        name="tower",
        title=f"ranking tower: six {width}x{width} float32 layers ({path.stat().st_size / 1e6:.0f} MB)",
        path=path,
        output="scores",
        inputs=inputs,
        requests=[request_of("v2-binary", to_tensors(row)) for row in inputs],
        expected=direct(path, inputs, "scores"),
        in_batch=direct(path, inputs, "scores", copies=2),
        words=[],
        rate=rate,
    )
