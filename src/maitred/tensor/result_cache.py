"""Response cache: answers of models with `response_cache { enable: true }`, by tenant, model files and inputs.

They stand in the server's result cache (`maitred.fleet.result_cache`): one budget, and the least recently used of all
goes first. What a reload replaced is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from time import perf_counter_ns

import msgspec

from maitred.core.clock import Clock
from maitred.core.request import Charges, FinishReason
from maitred.core.step import RequestTiming
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor
from maitred.fleet.result_cache import Answer as Kept
from maitred.fleet.result_cache import ResultCache
from maitred.tensor.runner import Answer, Done
from maitred.tensor.served_models import LoadedVersion

OnLook = Callable[[str, int, bool, int], None]  # model, version, whether it was there, nanoseconds

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Tensor, ...]).decode


def cache_key(request: InferRequest, files_print: bytes) -> bytes:
    """The print of the model's files, and sha256 over it, the tenant, the wanted outputs and the inputs."""
    digest = sha256(files_print)
    parts: list[bytes | memoryview] = [request.tenant.encode("utf-8", "surrogatepass"), _encode(request.outputs)]
    for tensor in sorted(request.inputs, key=lambda each: each.name):
        data = memoryview(tensor.data).cast("B")
        parts += [_encode((tensor.name, tensor.datatype, tensor.shape)), data]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return files_print + digest.digest()


class CacheFlow:
    """A Flow: it answers what it knows, and notes what others answer."""

    def __init__(self, cache: ResultCache, clock: Clock, on_look: OnLook = lambda *_: None) -> None:
        self._cache, self._clock, self._on_look = cache, clock, on_look
        self._loads: dict[int, LoadedVersion] = {}  # by their ids

    def __len__(self) -> int:
        return 0

    def take(self, loaded: LoadedVersion, request: InferRequest, done: Done) -> Done | None:
        if not loaded.config.response_cache.enable or not self._cache.max_bytes:
            return done
        self._loads[id(loaded)] = loaded
        begun = perf_counter_ns()
        key, now = cache_key(request, loaded.files_print), self._clock.now()
        found = self._cache.find(key, now)
        looked_ns = perf_counter_ns() - begun
        if found is None:
            return partial(self._keep, loaded, key, looked_ns, done)
        self._on_look(loaded.name, loaded.number, True, looked_ns)
        response = InferResponse(model=request.model, version=loaded.number, outputs=_decode(found.body))
        timing = RequestTiming(
            queue_s=0.0, prefill_s=0.0, decode_s=0.0, ttft_s=max(0.0, now - (request.arrived_at or now))
        )
        done(Answer(response, FinishReason.STOP, Charges(), timing))
        return None

    def _keep(self, loaded: LoadedVersion, key: bytes, looked_ns: int, done: Done, answer: Answer) -> None:
        begun = perf_counter_ns()
        if isinstance(answer.result, InferResponse):
            if not loaded.replaced:
                self._cache.keep(key, Kept(b"", _encode(answer.result.outputs), self._clock.now()))
            self._on_look(loaded.name, loaded.number, False, looked_ns + perf_counter_ns() - begun)
        done(answer)

    def cancel(self, request_id: str, reason: FinishReason) -> bool:
        return False

    def turn(self) -> None:
        """Drops the answers of what is served no more."""
        for key in [key for key, loaded in self._loads.items() if loaded.replaced]:
            self._cache.drop_all(self._loads.pop(key).files_print)

    @property
    def next_at(self) -> float | None:
        return None
