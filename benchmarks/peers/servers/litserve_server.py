"""The model behind LitServe: litserve_server.py PORT."""

from __future__ import annotations

import sys
from typing import Any

import litserve
from profiled_model import given


class Echo(litserve.LitAPI):
    """One row a request; lists where batches are allowed."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's signature
        """Load the model, in the worker's process."""
        self.model, _ = given()

    def decode_request(self, request) -> list[float]:  # type: ignore[no-untyped-def]  # noqa: ANN001 - a type means another thing
        """Take the row."""
        return request["row"]

    def predict(self, x: list[Any]) -> list[Any]:
        """Serve a batch, or one row."""
        self.model(x if isinstance(x[0], list) else [x])
        return x

    def encode_response(self, output: list[float]) -> dict[str, Any]:
        """Give it back."""
        return {"row": output}


class Batches(Echo):
    """A list of rows; LitServe warns of these two where it batches nothing."""

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Leave rows a list: there is no tensor to stack them into."""
        return inputs

    def unbatch(self, output: list[Any]) -> list[Any]:
        """Likewise."""
        return output


if __name__ == "__main__":
    _, settings = given()
    queue = {"fast_queue": settings.pop("fast_queue")} if "fast_queue" in settings else {}
    made = Batches(**settings) if "max_batch_size" in settings else Echo()
    server = litserve.LitServer(made, accelerator="cpu", **queue)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
