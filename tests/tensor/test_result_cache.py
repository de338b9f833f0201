"""The response cache of tensor models: who is answered from it, and what is dropped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np

from maitred.storage.result_cache import ResultCache
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.host import LocalTensorService
from maitred.tensor.served_models import ControlMode
from tests.tensor.ensembles import scale_model, write_diamond
from tests.tensor.models import write_model
from tests.tensor.test_ensembles import ask

CACHED = "max_batch_size: 4 response_cache { enable: true }"


@asynccontextmanager
async def cached(repository, cache, mode=ControlMode.NONE, load=()):
    service = LocalTensorService(repository, mode, cache=cache)
    await service.start(load)
    try:
        yield service
    finally:
        await service.close()


def double(request_id, value, **fields):
    return ask(request_id, value, model="double", name="x", **fields)


async def answer(service, request):
    return array_of((await service.infer(request)).outputs[0])[0, 0]


def looks(service, model="double"):
    (told,) = service.statistics(model)
    return told.inference_count, told.cache_miss[0], told.cache_hit[0]


def test_the_same_inputs_of_the_same_tenant_are_computed_once(tmp_path):
    write_model(tmp_path, "double", model=scale_model(2.0), config=CACHED)
    cache = ResultCache(1 << 20, 60.0)

    async def story():
        async with cached(tmp_path, cache) as service:
            assert [await answer(service, double(f"a{at}", 5, tenant="ann")) for at in range(3)] == [10, 10, 10]
            assert looks(service) == (1, 1, 2)
            assert await answer(service, double("bob", 5, tenant="bob")) == 10
            assert await answer(service, double("six", 6, tenant="ann")) == 12
            assert looks(service) == (3, 3, 2)
            other = tensor_of("x", np.full((1, 4), 5, np.int32), "TYPE_INT32")  # the same bytes are another input
            assert double("b", 5).inputs[0].data.nbytes == other.data.nbytes
            assert (await service.infer(double("hit", 6, tenant="ann"))).compute_us == 0

    asyncio.run(story())


def test_a_reload_drops_what_the_old_model_answered(tmp_path):
    write_model(tmp_path, "double", model=scale_model(2.0), config=CACHED)
    cache = ResultCache(1 << 20, 60.0)

    async def story():
        async with cached(tmp_path, cache, ControlMode.EXPLICIT, ["double"]) as service:
            assert await answer(service, double("a", 5)) == 10
            assert len(cache) == 1
            (tmp_path / "double" / "1" / "model.onnx").unlink()
            (tmp_path / "double" / "1").rmdir()
            write_model(tmp_path, "double", model=scale_model(20.0))
            await service.load("double")
            assert len(cache) == 0
            assert await answer(service, double("b", 5)) == 100

    asyncio.run(story())


def test_the_least_recently_used_goes_when_the_budget_is_full(tmp_path):
    write_model(tmp_path, "double", model=scale_model(2.0), config=CACHED)
    cache = ResultCache(8 * 600, 60.0)

    async def story():
        async with cached(tmp_path, cache) as service:
            for at in range(20):
                await answer(service, double(f"r{at}", at))
            cache.check_invariants()
            assert 0 < len(cache) < 10
            assert looks(service) == (20, 20, 0)
            await answer(service, double("again", 19))
            await answer(service, double("gone", 0))
            assert looks(service) == (21, 21, 1)

    asyncio.run(story())


def test_each_step_of_an_ensemble_has_its_own_answers(tmp_path):
    write_diamond(tmp_path, cached=True)

    async def story():
        async with cached(tmp_path, ResultCache(1 << 20, 60.0)) as service:
            for at in range(3):
                assert await answer(service, ask(f"r{at}", 4)) == 20
            assert looks(service) == (1, 1, 2)
            assert looks(service, "triple") == (3, 0, 0)

    asyncio.run(story())
