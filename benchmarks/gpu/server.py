"""A model server as people write them: aiohttp, one thread that owns the GPU, Open Inference V2, no batching.

`python server.py MODEL PORT DEVICE`
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.models import build, example

LENGTH = "Inference-Header-Content-Length"


class Server:
    """One model."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.model = build(name, device)
        self.sample = example(name, 1, "cpu").numpy()
        self.thread = ThreadPoolExecutor(1)
        for rows in (1, 2, 4, 8, 16, 32, 64):
            self.run(np.repeat(self.sample, rows, axis=0))

    @torch.inference_mode()
    def run(self, rows: np.ndarray) -> np.ndarray:
        """Compute a batch."""
        return self.model(torch.from_numpy(rows).to(self.device)).cpu().numpy()

    async def infer(self, request: web.Request) -> web.Response:
        """Answer one request with binary tensors."""
        body = await request.read()
        head = int(request.headers[LENGTH])
        rows = np.frombuffer(body, self.sample.dtype, offset=head).reshape(-1, *self.sample.shape[1:])
        logits = await asyncio.get_running_loop().run_in_executor(self.thread, self.run, rows.copy())
        data = logits.tobytes()
        described = {"name": "logits", "datatype": "FP32", "shape": list(logits.shape)}
        text = web.json_response(
            {"model_name": self.name, "outputs": [described | {"parameters": {"binary_data_size": len(data)}}]}
        ).body
        return web.Response(body=bytes(text) + data, headers={LENGTH: str(len(text))})

    async def metadata(self, _: web.Request) -> web.Response:
        """Describe the model: dimension 0 of input and output is the batch."""
        datatype = self.sample.dtype.name.upper()
        classes = 1000 if self.sample.ndim == 4 else 2
        return web.json_response(
            {
                "name": self.name,
                "inputs": [{"name": "input", "datatype": datatype, "shape": [-1, *self.sample.shape[1:]]}],
                "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, classes]}],
            }
        )


def main() -> None:
    """Serve until a signal ends it."""
    name, port, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    server = Server(name, device)
    app = web.Application(client_max_size=2**26)
    app.router.add_get(f"/v2/models/{name}", server.metadata)
    app.router.add_post(f"/v2/models/{name}/infer", server.infer)
    for path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{name}/ready"):
        app.router.add_get(path, lambda _: web.Response())
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
