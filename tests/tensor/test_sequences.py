"""Sequences: one request after another, with controls, and with what the server remembers between them."""

from __future__ import annotations

import asyncio
import random
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from maitred.core.clock import WallClock
from maitred.core.errors import InvalidRequest, ModelNotFound, QueueTimeout
from maitred.core.tensor_request import InferRequest, SequenceControl
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.sequences import SequenceBook, SequenceFlow
from maitred.tensor.served_models import ControlMode
from tests.fakes import with_terms
from tests.tensor.models import model_of, wheel_file
from tests.tensor.test_local import served

# ---- the book


def test_each_request_waits_for_the_one_before_it_and_sequences_for_slots():
    book = SequenceBook("vad", 1, 5.0, {"state": 0})
    (turn,) = book.add("a1", ("", 1), start=True, end=False)
    assert (turn.request_id, turn.start, turn.end, turn.states) == ("a1", True, False, {"state": 0})
    assert book.add("a2", ("", 1), start=False, end=True) == []
    assert book.add("b1", ("", 2), start=True, end=True) == []
    (turn,) = book.answered("a1", {"state": 7}, 1.0)
    assert (turn.request_id, turn.start, turn.end, turn.states) == ("a2", False, True, {"state": 7})
    (turn,) = book.answered("a2", {"state": 8}, 2.0)
    assert (turn.request_id, turn.states) == ("b1", {"state": 0})
    with pytest.raises(InvalidRequest, match="sequence 1 to model 'vad' must specify the START flag"):
        book.add("a3", ("", 1), start=False, end=False)
    with pytest.raises(InvalidRequest, match="START"):  # another tenant's
        book.add("c1", ("mallory", 2), start=False, end=False)


def test_what_failed_never_happened():
    book = SequenceBook("vad", 1, 5.0, {"state": 0})
    book.add("a1", ("", 1), start=True, end=False)
    assert book.answered("a1", None, 1.0) == []
    (turn,) = book.add("a2", ("", 1), start=False, end=False)
    assert (turn.start, turn.states) == (True, {"state": 0})
    book.answered("a2", {"state": 1}, 2.0)
    (turn,) = book.add("a3", ("", 1), start=True, end=False)  # the one before was not ended
    assert (turn.start, turn.states) == (True, {"state": 0})


def test_a_sequence_that_nobody_goes_on_with_gives_its_slot_to_the_next():
    book = SequenceBook("vad", 1, 5.0, {})
    book.add("a1", ("", 1), start=True, end=False)
    book.add("b1", ("", 2), start=True, end=False)
    assert book.next_at is None
    book.answered("a1", {}, 1.0)
    assert book.next_at == 6.0
    assert book.expire(5.9) == []
    assert [turn.request_id for turn in book.expire(6.0)] == ["b1"]
    with pytest.raises(InvalidRequest, match="START"):
        book.add("a2", ("", 1), start=False, end=False)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_comes_to_its_turn_in_order(seed):
    dice, book, now = random.Random(seed), SequenceBook("any", 3, 50.0, {"state": ()}), 0.0
    running, open_keys, held, number = {}, set(), set(), 0

    def go(turns):
        for turn in turns:
            held.discard(turn.request_id)
            running[turn.request_id] = turn

    for _ in range(400):
        now += dice.random()
        match dice.randrange(4):
            case 0 | 1:
                key, end = ("", dice.randrange(6)), dice.random() < 0.3
                start = key not in open_keys
                number += 1
                held.add(f"r{number}")
                if start:
                    open_keys.add(key)
                go(book.add(f"r{number}", key, start=start, end=end))
                if end:
                    open_keys.discard(key)
            case 2 if running:
                request_id = dice.choice(sorted(running))
                turn = running.pop(request_id)
                before = turn.states["state"]
                assert turn.start == (before == ())
                go(book.answered(request_id, {"state": (*before, request_id)}, now))
            case 3 if held:
                request_id = dice.choice(sorted(held))
                assert book.is_held(request_id)
                held.discard(request_id)
                go(book.give_up(request_id, now))
                open_keys = {key for key in open_keys if key in book._open}
        assert len(running) <= 3
        book.check_invariants()
    while len(book):
        for request_id, turn in tuple(running.items()):
            del running[request_id]
            go(book.answered(request_id, {"state": (*turn.states["state"], request_id)}, now))
        now += 100.0
        go(book.expire(now))
    assert not held


# ---- served


def accumulator():
    """Batches of sums: OUT = where(START, 0, sum) + IN, and what is told of END and CORRID."""
    float_, boolean, long = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
    inputs = [
        helper.make_tensor_value_info(name, kind, ("batch", 1))
        for name, kind in [("IN", float_), ("START", boolean), ("END", boolean), ("ID", long), ("sum", float_)]
    ]
    outputs = [
        helper.make_tensor_value_info(name, kind, ("batch", 1))
        for name, kind in [("OUT", float_), ("ended", boolean), ("who", long), ("new_sum", float_)]
    ]
    nodes = [
        helper.make_node("Add", ["IN", "sum"], ["added"]),
        helper.make_node("Where", ["START", "IN", "added"], ["OUT"]),
        helper.make_node("Identity", ["OUT"], ["new_sum"]),
        helper.make_node("Identity", ["END"], ["ended"]),
        helper.make_node("Identity", ["ID"], ["who"]),
    ]
    return model_of(helper.make_graph(nodes, "sum", inputs, outputs))


def sums(repository, *, strategy="oldest { max_candidate_sequences: 4 }", initial="", idle_us=60_000_000):
    (repository / "sums" / "1").mkdir(parents=True)
    onnx.save(accumulator(), repository / "sums" / "1" / "model.onnx")
    controls = "".join(
        f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'
        for name, kind, values in [
            ("START", "START", "bool_false_true: [ false, true ]"),
            ("END", "END", "bool_false_true: [ false, true ]"),
            ("ID", "CORRID", "data_type: TYPE_INT64"),
        ]
    )
    (repository / "sums" / "config.pbtxt").write_text(
        f"max_batch_size: 4 instance_group {{ count: 1 kind: KIND_CPU }} sequence_batching {{ {strategy} {controls} "
        f"max_sequence_idle_microseconds: {idle_us} state {{ "
        f'input_name: "sum" output_name: "new_sum" data_type: TYPE_FP32 dims: 1 {initial} }} }}'
    )


def ask(request_id, value, sequence, *, start=False, end=False, **fields):
    tensor = tensor_of("IN", np.array([[value]], np.float32), "TYPE_FP32")
    control = None if sequence is None else SequenceControl(correlation_id=sequence, start=start, end=end)
    return InferRequest(request_id=request_id, model="sums", inputs=(tensor,), sequence=control, **with_terms(fields))


def value(answer, name="OUT"):
    return next(array_of(each)[0, 0] for each in answer.outputs if each.name == name)


@pytest.mark.parametrize(
    "strategy",
    [
        "oldest { max_candidate_sequences: 3 max_queue_delay_microseconds: 1000 }",
        "direct { max_queue_delay_microseconds: 1000 minimum_slot_utilization: 0.5 }",
    ],
)
def test_sequences_that_are_sent_at_once_add_up_each_for_itself(tmp_path, strategy):
    sums(tmp_path, strategy=strategy)

    async def story():
        async with served(tmp_path) as service:
            asked = [
                service.infer(ask(f"{who}/{at}", at, who, start=at == 0, end=at == 9))
                for at in range(10)
                for who in range(1, 7)
            ]
            answers = await asyncio.gather(*asked)
            for index, answer in enumerate(answers):
                at, who = divmod(index, 6)
                assert (value(answer), value(answer, "who")) == (at * (at + 1) / 2, who + 1)
                assert value(answer, "ended") == (at == 9)
                assert [each.name for each in answer.outputs] == ["OUT", "ended", "who"]  # the state is the server's
            (told,) = service.statistics("sums")
            assert told.inference_count == 60
            assert told.execution_count < 60
            assert len(service.runner) == 0

    asyncio.run(story())


def test_requests_that_are_none_of_a_sequence_are_refused(tmp_path):
    sums(tmp_path)

    async def story():
        async with served(tmp_path) as service:
            for wrong, says in [
                (ask("none", 1, None), "non-zero or non-empty correlation ID"),
                (ask("text", 1, "abc", start=True), "takes correlation ids of TYPE_INT64"),
                (ask("large", 1, 2**63, start=True), "cannot hold"),
                (ask("begun", 1, 5), "must specify the START flag"),
            ]:
                with pytest.raises(InvalidRequest, match=says):
                    await service.infer(wrong)
            smuggled = ask("state", 1, 5, start=True)
            state = tensor_of("sum", np.ones((1, 1), np.float32), "TYPE_FP32")
            with pytest.raises(InvalidRequest, match="unexpected inference input 'sum'"):
                await service.infer(
                    InferRequest(
                        request_id="state", model="sums", inputs=(*smuggled.inputs, state), sequence=smuggled.sequence
                    )
                )
            assert len(service.runner) == 0

    asyncio.run(story())


def test_a_request_without_a_slot_times_out_when_due_and_an_idle_sequence_gives_its_own_away(tmp_path):
    sums(tmp_path, strategy="oldest { max_candidate_sequences: 1 }", idle_us=300_000)

    async def story():
        async with served(tmp_path) as service:
            await service.infer(ask("a", 1, 1, start=True))
            with pytest.raises(QueueTimeout, match="Request timeout expired"):
                await service.infer(ask("late", 1, 2, start=True, start_by=WallClock().now() + 0.01))
            assert value(await service.infer(ask("b", 1, 3, start=True, end=True))) == 1  # once the first was idle
            with pytest.raises(InvalidRequest, match="START"):
                await service.infer(ask("a2", 1, 1))
            assert len(service.runner) == 0

    asyncio.run(story())


def test_requests_that_wait_when_their_model_goes_are_told_and_a_new_load_begins_anew(tmp_path):
    sums(tmp_path, strategy="oldest { max_candidate_sequences: 1 }")

    async def story():
        async with served(tmp_path, ControlMode.EXPLICIT, load=["sums"]) as service:
            await service.infer(ask("a", 1, 1, start=True))
            waiting = [asyncio.ensure_future(service.infer(ask(f"b{at}", 1, 2, start=at == 0))) for at in range(3000)]
            await asyncio.sleep(0)
            await service.unload("sums")
            await service.load("sums")
            assert value(await service.infer(ask("c", 5, 1, start=True, end=True))) == 5  # a slot of the new load
            await service.unload("sums")
            flow = next(each for each in service.runner.flows if isinstance(each, SequenceFlow))
            (old,) = flow._models.values()
            flow._begin(old.book.expire(float("inf")))
            service.host.turn()  # as the wake does that ends them by the clock
            told = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(each) for each in told} == {ModelNotFound}
            flow._begin(old.book.expire(float("inf")))
            service.runner.turn()
            assert not flow._models

    asyncio.run(story())


def test_a_state_begins_as_its_file_says_and_a_wrong_file_refuses_the_model(tmp_path):
    sums(tmp_path, initial='initial_state { name: "first" data_type: TYPE_FP32 dims: 1 data_file: "sum" }')
    (tmp_path / "sums" / "initial_state").mkdir()
    path = tmp_path / "sums" / "initial_state" / "sum"
    config = (tmp_path / "sums" / "config.pbtxt").read_text()
    (tmp_path / "sums" / "config.pbtxt").write_text(config.replace("[ false, true ]", "[ false, false ]"))  # no START
    path.write_bytes(np.float32(40).tobytes())

    async def story():
        async with served(tmp_path) as service:
            assert value(await service.infer(ask("a", 2, 1, start=True, end=True))) == 42

    asyncio.run(story())
    path.write_bytes(b"123")

    async def refused():
        async with served(tmp_path) as service:
            (entry,) = service.index()
            assert "has 3 bytes, and dims [1] need 4" in entry.reason

    asyncio.run(refused())


def test_silero_vad_streams_without_its_state_and_equals_onnxruntime_alone(tmp_path):
    path = wheel_file("silero_vad", "data/silero_vad_16k_op15.onnx")
    (tmp_path / "vad" / "1").mkdir(parents=True)
    shutil.copy(path, tmp_path / "vad" / "1" / "model.onnx")
    (tmp_path / "vad" / "config.pbtxt").write_text(
        'sequence_batching { oldest { max_candidate_sequences: 8 } state { input_name: "state" output_name: "stateN" '
        "data_type: TYPE_FP32 dims: [ 2, 1, 128 ] } }"
    )
    audio = np.random.default_rng(3).normal(size=(12, 1, 576)).astype(np.float32)
    session, state, alone = onnxruntime.InferenceSession(str(path)), np.zeros((2, 1, 128), np.float32), []
    for chunk in audio:
        output, state = session.run(None, {"input": chunk, "state": state, "sr": np.array(16000)})
        alone.append(output[0, 0])

    def chunk_of(who, at):
        inputs = tensor_of("input", audio[at], "TYPE_FP32"), tensor_of("sr", np.array([16000]), "TYPE_INT64")
        control = SequenceControl(correlation_id=f"call {who}", start=at == 0, end=at == len(audio) - 1)
        return InferRequest(request_id=f"{who}/{at}", model="vad", inputs=inputs, sequence=control)

    async def story():
        async with served(tmp_path) as service:
            asked = [service.infer(chunk_of(who, at)) for at in range(len(audio)) for who in range(3)]
            answers = await asyncio.gather(*asked)
            heard = np.array([array_of(answer.outputs[0])[0, 0] for answer in answers]).reshape(len(audio), 3)
            assert [each.name for each in answers[0].outputs] == ["output"]
            np.testing.assert_array_equal(heard, np.array(alone)[:, None].repeat(3, 1))

    asyncio.run(story())
