"""Chats with tools, thoughts and schemas keep to the restaurant, and one template writes and reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.batches import REPLY_WEIGHT, Batches
from training.evaluate import asks_of
from training.generate import generate
from training.menu import BY_NAME
from training.model import DRAFT, Decoder
from training.shapes import ORDER_SCHEMA, bound_spans, opening
from training.tokenizer import MARKS, render, save_tokenizer, train_tokenizer
from training.tools import TOOLS, result_of
from training.turn import Turn, is_held_out
from training.world import CALLS, SCORED, SHAPES, Chat, held_out_question, held_out_shape, shaped_chat

seeds = st.integers(0, 2**32)
PARAMETERS: dict[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Smaller than the real one, and learnt from fewer chats."""
    return train_tokenizer(700, seed=0, num_chats=600)


def turns(seed: int) -> tuple[Chat, list[Turn]]:
    chat = shaped_chat(Random(seed), 8)
    return chat, list(chat.turns)


@given(seeds)
def test_calls_fit_their_schemas_and_what_is_said_after_them_is_what_their_results_say(seed: int):
    chat, said = turns(seed)
    listed = {tool["function"]["name"] for tool in chat.tools}
    for turn in said:
        assert not is_held_out(turn.key)
        messages = turn.replies()
        calls = messages[0].get("tool_calls", [])
        results = [message for message in messages if message["role"] == "tool"]
        assert [call["id"] for call in calls] == [result["tool_call_id"] for result in results]
        for call, told in zip(calls, results, strict=True):
            assert told["content"] == result_of(call["function"]["name"], call["function"]["arguments"])
        for call in turn.calls:
            assert call.name in listed
            jsonschema.validate(call.arguments, PARAMETERS[call.name])
            result = json.loads(result_of(*call))
            if "error" in result:
                assert f"I am sorry, {result['error']}." in turn.assistant
            if "price" in result:
                assert f"The {result['dish']} is {result['price']} euros." in turn.assistant
            if "total" in result:
                assert f"for {result['total']} euros." in turn.assistant
            if "booked" in result:
                assert f"for {call.arguments['people']} at {call.arguments['time']}" in turn.assistant
        for a, sign, b, sum_ in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", turn.thoughts):
            assert int(sum_) == (int(a) + int(b) if sign == "+" else int(a) - int(b)), turn


@pytest.mark.parametrize("shape", SHAPES)
def test_a_held_out_shape_is_what_its_name_says(shape: str):
    rng = Random(1)
    for _ in range(20):
        chat = held_out_shape(rng, shape)
        last = chat.turns[-1]
        assert is_held_out(last.key)
        assert bool(last.calls) == (shape in CALLS or shape == "thoughts and call")
        assert last.thinks == ("thoughts" in shape)
        assert chat.is_bound == (shape == "schema")
        assert bool(chat.tools) == (shape not in ("thoughts", "schema"))


def test_an_orders_json_fits_its_schema_and_is_spaced_as_json_dumps():
    rng = Random(2)
    for chat in [held_out_shape(rng, "schema") for _ in range(30)] + [
        held_out_question(rng, "json") for _ in range(30)
    ]:
        value = json.loads(chat.turns[-1].assistant)
        jsonschema.validate(value, ORDER_SCHEMA)
        assert json.dumps(value) == chat.turns[-1].assistant
        assert all(line["dish"] in BY_NAME for line in value["items"])


def test_a_thought_out_answer_has_its_steps_before_it():
    rng = Random(0)
    chats = [held_out_shape(rng, "thoughts") for _ in range(200)]
    bills = [turn for chat in chats if (turn := chat.turns[-1]).category == "bill"]
    assert bills
    assert all(re.fullmatch(r"The total is \d+ euros\.", turn.assistant) for turn in bills)
    assert all(" at " in turn.thoughts for turn in bills)


def test_the_same_chat_without_tools_has_no_calls():
    rng = Random(0)
    assert not any(turn.calls for name in SCORED for turn in held_out_question(rng, name, 2).turns)


def test_only_the_begin_and_the_keys_are_a_schemas():
    reply = '{"items": [{"dish": "soup", "count": 2}, {"dish": "tea", "count": 1}]}'
    assert opening(reply) == '{"items": [{"dish": "'
    assert [reply[start:end] for start, end in bound_spans(reply)] == ['{"items": [{"dish": "', ' "count": ']
    assert opening('[{"count": 2, "item": "soup"}]') == '[{"count": '


def test_marks_are_one_common_token_each(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() == 700
    for mark in MARKS:
        assert tokenizer.encode(f"a{mark}b", add_special_tokens=False).tokens[1] == mark
    ids = tokenizer.encode("<think>\nyes\n</think>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\nyes\n</think>"


def weighed(tokenizer: Tokenizer, chat: Chat) -> str:
    document = Batches(tokenizer, Random(0)).document_of(chat)
    kept = [token for token, weight in zip(document.ids, document.weights, strict=True) if weight == REPLY_WEIGHT]
    return tokenizer.decode(kept, skip_special_tokens=False)


def test_a_prompt_opens_thoughts_so_no_weight_is_on_that(tokenizer: Tokenizer):
    chat = held_out_shape(Random(4), "thoughts")
    last = chat.turns[-1]
    assert weighed(tokenizer, Chat("", (last,))) == f"{last.thoughts}\n</think>\n\n{last.assistant}<|im_end|>"


def test_no_weight_is_on_what_a_schema_decides(tokenizer: Tokenizer):
    order = Turn("schema", "Two soups.", '{"items": [{"dish": "soup", "count": 2}]}', "")
    assert weighed(tokenizer, Chat("", (order,), is_bound=True)) == 'soup",2}]}<|im_end|>'


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_asked_of_a_model_and_its_replies_make_the_chat(shape: str):
    rng = Random(5)
    for _ in range(10):
        chat = held_out_shape(rng, shape)
        asks = asks_of(chat)
        assert len(asks) == 1 + bool(chat.turns[-1].calls)
        assert asks[-1].prompt + asks[-1].reply + "<|im_end|>\n" == render(chat.messages(), tools=chat.tools)
        assert all(ask.reply for ask in asks)


def test_a_constraint_binds_its_row_alone(tokenizer: Tokenizer):
    torch.manual_seed(0)
    model = Decoder(DRAFT)
    wanted = [*tokenizer.encode("soup", add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]

    def only_soup(so_far: list[int]) -> torch.Tensor:
        allowed = torch.zeros(DRAFT.vocab_size, dtype=torch.bool)
        allowed[wanted[len(so_far)]] = True
        return allowed

    free = generate(model, tokenizer, ["one", "two"], max_tokens=4)
    bound = generate(model, tokenizer, ["one", "two"], max_tokens=4, constraints=[None, only_soup])
    assert bound == [free[0], "soup"]


def test_transformers_renders_tools_calls_and_thoughts_alike(tokenizer: Tokenizer, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 2048)
    hugging_face = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rng = Random(0)
    for shape in SHAPES * 3:
        chat = held_out_shape(rng, shape)
        messages, tools = chat.messages(), list(chat.tools) or None
        text = hugging_face.apply_chat_template(messages, tools=tools, tokenize=False)
        assert text == render(messages, tools=chat.tools)
        for thinks in (False, True):
            asked = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinks}
            prompt = hugging_face.apply_chat_template(messages[:-1], tools=tools, **asked)
            assert prompt.endswith("assistant\n<think>\n" if thinks else "assistant\n")
            assert prompt == render(messages[:-1], add_generation_prompt=True, tools=chat.tools, enable_thinking=thinks)


def test_the_servers_reader_finds_calls_and_thoughts_in_the_template(tokenizer: Tokenizer, tmp_path: Path):
    tool_format = pytest.importorskip("maitred.text.tool_format")
    from maitred.text.chat_template import ChatTemplate
    from maitred.text.tokenizer import Tokenizer as ServedTokenizer

    save_tokenizer(tokenizer, tmp_path, 2048)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    format = tool_format.read_answer_format(template, ServedTokenizer.from_folder(tmp_path))
    assert (format.name, format.reasoning_name, format.writes_calls) == ("hermes", "think", True)
