"""A TensorModels that really infers: lanes, instances in threads, batches joined and split."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from maitred.core.clock import WallClock
from maitred.core.errors import InvalidRequest, ModelNotFound, QueueTimeout
from maitred.core.tensor_request import InferRequest, Tensor
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.host import LocalTensorService
from maitred.tensor.served_models import ControlMode
from tests.fakes import with_terms
from tests.tensor.models import add_model, write_model

BATCHED = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 60000000 }
instance_group { kind: KIND_CPU count: 1 }
"""
BUCKETS = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }
parameters { key: "length_buckets" value { string_value: "4,8" } }
parameters { key: "pad.INPUT0" value { string_value: "7" } }
"""


@asynccontextmanager
async def served(repository, mode=ControlMode.NONE, load=()):
    service = LocalTensorService(repository, mode)
    await service.start(load)
    try:
        yield service
    finally:
        await service.close()


def request(request_id, *arrays, **fields):
    inputs = tuple(tensor_of(f"INPUT{at}", array, "TYPE_FP32") for at, array in enumerate(arrays))
    return InferRequest(request_id=request_id, model="add", inputs=inputs, **with_terms(fields))


def rows(*values, width=16):
    return np.repeat(np.array(values, np.float32)[:, None], width, 1)


def test_four_requests_share_a_batch_and_each_gets_its_rows(tmp_path):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with served(tmp_path) as service:
            asked = [service.infer(request(f"r{at}", rows(at), rows(10 * at))) for at in range(4)]
            answers = await asyncio.gather(*asked)
            assert [array_of(one.outputs[0])[0, 0] for one in answers] == [0, 11, 22, 33]
            assert sum(one.compute_us for one in answers) > 0
            (told,) = service.statistics("add")
            assert (told.inference_count, told.execution_count, told.success[0]) == (4, 1, 4)

    asyncio.run(ask())


def test_unlike_lengths_share_a_bucket_and_come_back_at_their_own_length(tmp_path):
    write_model(tmp_path, "add", config=BUCKETS, model=add_model(shape=("batch", "length")))

    async def ask():
        async with served(tmp_path) as service:
            short, long = rows(1, width=2), rows(2, width=4)
            answers = await asyncio.gather(
                service.infer(request("short", short, short)), service.infer(request("long", long, long))
            )
            assert [one.outputs[0].shape for one in answers] == [(1, 2), (1, 4)]
            assert np.array_equal(array_of(answers[0].outputs[0]), 2 * short)
            (told,) = service.statistics("add")
            assert told.batches[0][:2] == (2, 1)

    asyncio.run(ask())


def _pair(*first):
    return Tensor("INPUT0", *first), Tensor("INPUT1", "FP32", (1, 16), b"\0" * 64)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (_pair("FP32", (1, 16), b"\0" * 64)[:1], "'INPUT1' of model 'add' is missing"),
        (_pair("FP32", (1, 16), b"\0" * 60), "has 60 bytes"),
        (_pair("FP32", (1, 9), b"\0" * 36), "unexpected shape"),
        (_pair("INT32", (1, 16), b"\0" * 64), "data-type is 'INT32'"),
        (_pair("FP32", (2, 16), b"\0" * 128), "unlike numbers of rows"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_queues(tmp_path, inputs, says):
    write_model(tmp_path, "add")

    async def ask():
        async with served(tmp_path) as service:
            with pytest.raises(InvalidRequest, match=says):
                await service.infer(InferRequest(request_id="wrong", model="add", inputs=inputs))

    asyncio.run(ask())


def test_a_client_that_leaves_and_one_that_is_late_give_up_their_places(tmp_path):
    write_model(tmp_path, "add", config=BATCHED)

    async def ask():
        async with served(tmp_path) as service:
            gone = asyncio.ensure_future(service.infer(request("gone", rows(1), rows(1))))
            late = service.infer(request("late", rows(1), rows(1), start_by=WallClock().now() + 0.01))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(QueueTimeout, match="Request timeout expired"):
                await late
            assert len(service.runner) == 0

    asyncio.run(ask())


def test_models_come_and_go_while_requests_wait(tmp_path):
    write_model(tmp_path, "add", config=BATCHED, versions=(1,))

    async def ask():
        async with served(tmp_path, ControlMode.EXPLICIT) as service:
            with pytest.raises(ModelNotFound):
                await service.infer(request("early", rows(1), rows(1)))
            await service.load("add")
            waiting = [asyncio.ensure_future(service.infer(request(f"r{at}", rows(at), rows(at)))) for at in range(3)]
            await asyncio.sleep(0)
            last = asyncio.ensure_future(service.infer(request("r3", rows(3), rows(3))))
            await asyncio.sleep(0)
            await service.unload("add")
            assert [array_of(one.outputs[0])[0, 0] for one in await asyncio.gather(*waiting, last)] == [0, 2, 4, 6]
            assert service.versions("add") == ()
            assert not service.runner._lanes.has_model("add", 1)

    asyncio.run(ask())
