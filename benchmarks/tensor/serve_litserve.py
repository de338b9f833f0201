"""LitServe that adds two vectors, in batches of up to 16. HTTP port."""

import sys
from typing import Any

import litserve
import numpy as np


class Add(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request) -> np.ndarray:  # a type would become the schema of the body
        return np.array([request["INPUT0"], request["INPUT1"]], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        return batch[:, 0] + batch[:, 1]

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return {"OUTPUT": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Add(max_batch_size=16, batch_timeout=0.001), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
