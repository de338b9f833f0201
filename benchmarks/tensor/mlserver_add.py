"""MLServer's runtime that adds two vectors."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Add(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        first, second = (NumpyCodec.decode_input(each) for each in payload.inputs)
        output = NumpyCodec.encode_output("OUTPUT", first + second)
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])
