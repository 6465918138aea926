"""A real Triton on 127.0.0.1 with four models: run by the interpreter that has nvidia-pytriton, never by ours.

``affine`` y = 2x + 1 (FP32) with a dynamic batch; ``fixed`` the same without batching; ``half`` doubles FP16;
``upper`` turns BYTES to upper case. Usage: triton_server.py HTTP GRPC METRICS (three free ports).
"ready" on its output says that it serves; it ends with its input.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

SERVICE = 0.01
"""Seconds a call takes, so that requests meet."""


@batch
def affine(x):
    time.sleep(SERVICE)
    return {"y": 2 * x + 1}


def fixed(requests):
    return [{"y": 2 * request["x"] + 1} for request in requests]


@batch
def half(x):
    return {"y": (2 * x).astype(np.float16)}


@batch
def upper(text):
    return {"loud": np.char.upper(text.astype(bytes))}


def main(http: int, grpc: int, metrics: int) -> None:
    config = TritonConfig(
        http_address="127.0.0.1", http_port=http, grpc_address="127.0.0.1", grpc_port=grpc, metrics_port=metrics
    )
    batched = ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=0))
    rows = ModelConfig(batching=False)
    # Its own default hides the counts of its executions behind a token.
    open_to_all = TritonSecurityConfig(restricted_endpoints=[])
    with Triton(config=config, security_config=open_to_all) as triton:
        floats = [Tensor(name="x", dtype=np.float32, shape=(4,))], [Tensor(name="y", dtype=np.float32, shape=(4,))]
        triton.bind("affine", affine, *floats, config=batched)
        triton.bind("fixed", fixed, *floats, config=rows)
        halves = [Tensor(name="x", dtype=np.float16, shape=(-1,))], [Tensor(name="y", dtype=np.float16, shape=(-1,))]
        triton.bind("half", half, *halves, config=batched)
        texts = [Tensor(name="text", dtype=np.bytes_, shape=(1,))], [Tensor(name="loud", dtype=np.bytes_, shape=(1,))]
        triton.bind("upper", upper, *texts, config=batched)
        triton.run()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
