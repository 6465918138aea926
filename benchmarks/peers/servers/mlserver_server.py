"""The model behind MLServer: mlserver start FOLDER, which holds the settings of server and model."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from profiled_model import given


class Echo(MLModel):
    """One tensor, a row of it for each request of the batch."""

    async def load(self) -> bool:
        """Load the model."""
        self.model, _ = given()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Serve a batch."""
        (tensor,) = payload.inputs
        count, width = tensor.shape
        flat = list(tensor.data)
        self.model([flat[at * width : (at + 1) * width] for at in range(count)])
        outputs = [ResponseOutput(name="row", shape=tensor.shape, datatype=tensor.datatype, data=tensor.data)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
