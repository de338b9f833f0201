"""Drafts change no token: each way to ask for text, under proposers that are right, wrong and worse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from maitred import LLM, SamplingParams
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.engine.output import RequestOutput
from maitred.executor import rows
from maitred.executor.grammar import Grammars
from maitred.executor.state import DraftAsk, Proposer
from maitred.executor.text_drafts import NGramProposer
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.scheduler.state import SchedulerStats
from tests.model.adapters import random_tensors, write_adapter

VOCAB = 1536
PROMPTS = [
    "Which wine goes with the fish?",
    "Repeat: one two three four five six seven, one two three four five six seven",
    [5, 9, 300, 7, 5, 9, 300, 7, 5, 9],
    "The kitchen is open from noon to ten. " * 12,
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


class World(NamedTuple):
    """How text is asked for, and of what engine."""

    sampling: SamplingParams
    engine: Mapping[str, Any] = MappingProxyType({})
    happens: Callable[[SchedulerStats], int] = lambda stats: 1  # what it is about, counted
    has_adapter: bool = False


WORLDS = {
    "greedy": World(GREEDY),
    "seeded": World(SEEDED),
    "top_p, top_k and min_p": World(replace(SEEDED, top_p=0.9, top_k=50, min_p=0.01)),
    "penalties": World(
        replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4, temperature=0.5)
    ),
    "bad words": World(replace(GREEDY, bad_words=["wine", "the", " one two", " three four", "."])),
    "min_tokens": World(SamplingParams(temperature=0.0, min_tokens=9, max_tokens=24)),
    "logit bias": World(replace(SEEDED, logit_bias={5: 4.0, 9: 3.0, 300: 6.0})),
    "allowed tokens": World(replace(SEEDED, allowed_token_ids=[5, 9, 300, 7, 11])),
    "logprobs": World(replace(SEEDED, logprobs=3, prompt_logprobs=2)),
    "stop strings": World(replace(GREEDY, stop=["e", " fo"])),
    "stop tokens": World(SamplingParams(temperature=0.9, seed=3, max_tokens=30, stop_token_ids=list(range(0, 900, 3)))),
    "end of text": World(SamplingParams(temperature=0.0, max_tokens=60)),
    "samples": World(replace(SEEDED, n=3, logprobs=0)),
    "one token": World(replace(GREEDY, max_tokens=1)),
    "chunked prompts": World(replace(SEEDED, prompt_logprobs=0), {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
    "small steps": World(SEEDED, {"max_num_batched_tokens": 5, "max_num_seqs": 4}),
    "preemption": World(
        replace(SEEDED, n=2, max_tokens=60), {"block_size": 4, "num_blocks": 70}, lambda stats: stats.num_preemptions
    ),
    "swapping": World(
        replace(SEEDED, n=2, max_tokens=60, presence_penalty=1.0),
        {"block_size": 4, "num_blocks": 70, "swap_memory_bytes": 2**24},
        lambda stats: stats.num_preemptions,
    ),
    "an adapter": World(SEEDED, has_adapter=True),
    "an adapter and two ranks": World(replace(SEEDED, n=2), {"tensor_parallel": 2}, has_adapter=True),
    "a grammar": World(
        replace(GREEDY, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=r"[a-z ]{3,40}(one|two)?"))
    ),
    "a schema": World(
        SamplingParams(
            temperature=0.8,
            seed=5,
            max_tokens=80,
            structured_outputs=StructuredOutputsParams(
                json={
                    "type": "object",
                    "properties": {"dish": {"enum": ["fish", "soup"]}, "people": {"type": "integer"}},
                    "required": ["dish", "people"],
                    "additionalProperties": False,
                }
            ),
        )
    ),
}

Draft = Callable[[Sequence[int], int, int], list[int]]
"""(what will be output from here on, how many are asked for, number of the ask) -> drafts"""


def right(coming: Sequence[int], count: int, turn: int) -> list[int]:
    return list(coming[:count])


def wrong(coming: Sequence[int], count: int, turn: int) -> list[int]:
    return [(token + 1) % VOCAB for token in coming[:count]]


def half_right(coming: Sequence[int], count: int, turn: int) -> list[int]:
    """Right up to another place each time, wrong from there on."""
    return [token if i < turn % (count + 1) else 3 for i, token in enumerate(coming[:count])]


def adversarial(coming: Sequence[int], count: int, turn: int) -> list[int]:
    """No tokens at all, too many, none of the vocabulary, right ones one place late."""
    guesses = [
        [],
        [*coming, *coming][: count + 9],
        [coming[0], -1, *coming[2:]],
        [VOCAB + 5] * count,
        list(coming[1:]),
        [coming[0]] * count,
    ]
    return guesses[turn % len(guesses)]


class Scripted:
    """Knows what will come, and drafts what `draft` makes of it (`proposer.Proposer`)."""

    name = "scripted"

    def __init__(self, outputs: Sequence[RequestOutput], draft: Draft) -> None:
        self._draft, self._turn = draft, 0
        self._outputs = {
            (tuple(output.prompt_token_ids), sample.index): list(sample.token_ids)
            for output in outputs
            for sample in output.outputs
        }

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: DraftAsk) -> Sequence[int]:
        request, self._turn = ask.request, self._turn + 1
        tokens = request.tokens.array.tolist()
        prompt = tuple(tokens[: request.num_prompt_tokens])
        whole = self._outputs[prompt, request.sampler.sample_index]  # type: ignore[attr-defined]
        coming = whole[len(tokens) - len(prompt) :]
        return self._draft(coming, ask.num_drafts, self._turn) if coming else [1]

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass


NUM_DRAFTS = 4


def make_llm(engine: Mapping[str, Any]) -> LLM:
    settings = {"max_model_len": 256, "executor": "native", "speculative": "off", **engine}
    num_blocks = settings.pop("num_blocks", None)
    if num_blocks is not None:
        probed = {name: settings[name] for name in ("speculative", "block_size")}
        with LLM(max_model_len=64, executor="native", **probed) as probe:
            settings["kv_cache_memory_bytes"] = num_blocks * probe.memory_plan.bytes_per_block
    return LLM(**settings)


class Served(NamedTuple):
    outputs: list[RequestOutput]
    stats: SchedulerStats


def serve(world: World, proposer: Proposer | None = None) -> Served:
    """With a proposer each row has drafts, as many as there is room for, whatever that costs.

    Masks are waited for: while a grammar's worker is late, which the machine decides, rows have no drafts.
    """
    with ExitStack() as stack:
        patient = stack.enter_context(pytest.MonkeyPatch.context())
        patient.setattr(Grammars, "may_draft", property(Grammars.wait))
        patient.setattr(rows, "PATIENCE_S", math.inf)
        lora = {"a": str(adapter(Path(stack.enter_context(TemporaryDirectory()))))} if world.has_adapter else {}
        llm = stack.enter_context(make_llm({**world.engine, "lora": lora}))
        core = llm._open().core
        if proposer is not None:
            core._executor.proposer = proposer  # type: ignore[attr-defined]
        if core._executor.proposer is not None:  # type: ignore[attr-defined]
            core.scheduler.num_drafts = lambda request, num_rows: NUM_DRAFTS
        return Served(llm.generate(PROMPTS, world.sampling, lora="a" if lora else None), core.stats)


def adapter(folder: Path) -> Path:
    with open_checkpoint(None) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    return write_adapter(folder, random_tensors(spec, 4), rank=4)


def in_worlds(turn: int | None = None) -> pytest.MarkDecorator:
    """In every world, or in a third of them by turns; the others are for `make soak`."""
    marks = [() if turn in (None, number % 3) else (pytest.mark.soak,) for number in range(len(WORLDS))]
    found = [pytest.param(name, marks=of_world) for name, of_world in zip(WORLDS, marks, strict=True)]
    return pytest.mark.parametrize("world", found, indirect=True, scope="module")


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> tuple[World, Served]:
    """A world, and what is served in it without drafts."""
    world = WORLDS[request.param]
    alone = serve(world)
    assert world.happens(alone.stats)
    return world, alone


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All but times and request ids."""
    return [
        (
            output.prompt_logprobs,
            [(s.token_ids, s.text, s.logprobs, s.finish_reason, s.stop_reason) for s in output.outputs],
        )
        for output in outputs
    ]


@in_worlds()
def test_right_drafts_change_nothing_and_save_steps(world: tuple[World, Served]):
    asked, alone = world
    served = serve(asked, Scripted(alone.outputs, right))
    assert told(served.outputs) == told(alone.outputs)
    assert asked.happens(served.stats)
    if asked.sampling.max_tokens != 1:
        assert served.stats.num_steps < alone.stats.num_steps
        assert served.stats.drafts.num_accepted > 0


@in_worlds(turn=0)
def test_other_drafts_change_nothing_whatever_they_are(world: tuple[World, Served]):
    """In turns such as are wrong, half right, or no tokens at all."""
    asked, alone = world
    draft = (wrong, half_right, adversarial)[[*WORLDS.values()].index(asked) // 3 % 3]
    served = serve(asked, Scripted(alone.outputs, draft))
    assert told(served.outputs) == told(alone.outputs)
    assert asked.happens(served.stats)
    if draft is wrong:
        assert served.stats.drafts.num_accepted == 0


@in_worlds(turn=1)
def test_a_head_changes_nothing(world: tuple[World, Served]):
    asked, alone = world
    served = serve(asked._replace(engine={**asked.engine, "speculative": "mtp"}))
    assert told(served.outputs) == told(alone.outputs)
    assert asked.happens(served.stats)


@in_worlds(turn=2)
def test_text_that_is_looked_up_changes_nothing(world: tuple[World, Served]):
    asked, alone = world
    assert told(serve(asked, NGramProposer()).outputs) == told(alone.outputs)
