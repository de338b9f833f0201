"""Ray Serve that adds two vectors, in batches of up to 16. HTTP port."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=64)
class Add:
    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.001)
    async def add(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        batch = np.stack(inputs)
        return list(batch[:, 0] + batch[:, 1])

    async def __call__(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        inputs = np.array([body["INPUT0"], body["INPUT1"]], np.float32)
        return {"OUTPUT": (await self.add(inputs)).tolist()}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Add.bind(), route_prefix="/predict")
    signal.pause()
