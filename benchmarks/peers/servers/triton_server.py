"""The model behind Triton, by nvidia-pytriton: triton_server.py HTTP GRPC METRICS (three free ports)."""

from __future__ import annotations

import sys
import threading

import numpy as np
from profiled_model import given
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def main(http: int, grpc: int, metrics: int) -> None:
    """Serve until ended."""
    model, settings = given()

    @batch
    def echo(row: np.ndarray) -> dict[str, np.ndarray]:
        model(row.tolist())
        return {"same": row}

    delay = settings.pop("max_queue_delay_microseconds", None)
    batcher = {} if delay is None else {"batcher": DynamicBatcher(max_queue_delay_microseconds=delay)}
    config = TritonConfig(
        http_address="127.0.0.1", http_port=http, grpc_address="127.0.0.1", grpc_port=grpc, metrics_port=metrics
    )
    with Triton(config=config) as triton:
        tensors = (
            [Tensor(name="row", dtype=np.float32, shape=(-1,))],
            [Tensor(name="same", dtype=np.float32, shape=(-1,))],
        )
        triton.bind("echo", echo, *tensors, config=ModelConfig(**settings, **batcher))
        triton.run()
        threading.Event().wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
