"""The model behind BentoML: bentoml serve bentoml_server:Echo --host 127.0.0.1 --port PORT."""

import bentoml
from profiled_model import given

_, SETTINGS = given()


@bentoml.service(workers=1)
class Echo:
    """A client's rows in a list, of one here; batches are longer lists."""

    def __init__(self) -> None:
        self.model, _ = given()

    @bentoml.api(batchable=True, **SETTINGS)
    def predict(self, rows: list[list[float]]) -> list[list[float]]:
        """Serve a batch."""
        self.model(rows)
        return rows
