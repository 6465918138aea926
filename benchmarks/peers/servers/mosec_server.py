"""The model behind mosec: mosec_server.py --address 127.0.0.1 --port PORT."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker
from profiled_model import given

MODEL, SETTINGS = given()


class Echo(Worker):
    """One row a request; a list of them where batches are allowed."""

    def forward(self, data: Any) -> Any:  # noqa: ANN401 - mosec's signature
        """Serve a batch."""
        batch = data if self.max_batch_size > 1 else [data]
        MODEL([each["row"] for each in batch])
        return data


if __name__ == "__main__":
    server = Server()
    server.append_worker(Echo, **SETTINGS)
    server.run()
