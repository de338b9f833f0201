"""Requests with a grammar: what they say, that nothing around them changes it, and what a lost worker costs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.core.request import FinishReason, RequestSpec, ResumePoint, ThinkingLimit
from maitred.engine.build import EngineParts
from maitred.executor.state import DraftAsk
from tests.engine.grammar_worlds import (
    GRAMMARS,
    HOPELESS,
    LONG,
    ORDER,
    WORD,
    Served,
    ask,
    engine,
    grammars_of,
    samples,
    serve,
    tokenizer,
)


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineParts]:
    """Without forced tokens: each token is sampled in a step of its own."""
    with engine(forced_tokens=False) as parts:
        yield parts


@pytest.fixture(scope="module")
def forcing() -> Iterator[EngineParts]:
    with engine() as parts:
        yield parts


def alone(plain: EngineParts, specs: list[RequestSpec]) -> dict[str, Served]:
    return {name: served for spec in specs for name, served in serve(plain, [spec]).items()}


def a_mixture(count: int = 12) -> list[RequestSpec]:
    return [
        ask(f"r{i}", GRAMMARS[i % len(GRAMMARS)], prompt=f"Order {i}: " + "so " * (5 * i % 17), seed=i, max_tokens=50)
        for i in range(count)
    ]


def test_an_answer_fits_its_grammar_and_ends_with_it(forcing: EngineParts):
    specs = [ask("order", ORDER), ask("word", WORD, seed=3), ask("long", LONG), ask("free", "")]
    served = serve(forcing, specs)
    order = json.loads(served["order"].text)
    assert list(order) == ["name", "price", "size"]
    assert json.dumps(order, ensure_ascii=False) == served["order"].text
    assert re.fullmatch("[a-f]{2,7}", tokenizer().decode(served["word"].token_ids))
    assert re.fullmatch("The number .* is [0-9]{3}, and its table is [a-c][.]", served["long"].text)
    assert {served[name].finish_reason for name in ("order", "word", "long")} == {FinishReason.STOP}


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 55}], ids=str)
def test_a_complete_grammar_ends_the_answer_whatever_was_asked(forcing: EngineParts, params: dict[str, object]):
    assert serve(forcing, [ask("r", LONG, **params)])["r"].finish_reason is FinishReason.STOP


def test_max_tokens_inside_of_it_are_length(forcing: EngineParts):
    served = serve(forcing, [ask("r", LONG, max_tokens=5)])["r"]
    assert (len(served.token_ids), served.finish_reason) == (5, FinishReason.LENGTH)


def test_forced_tokens_save_steps_and_change_no_token(plain: EngineParts, forcing: EngineParts):
    steps: list[int] = []
    served = serve(forcing, [ask("r", ORDER)], before_step=steps.append)
    assert served == serve(plain, [ask("r", ORDER)])
    assert len(steps) < 0.6 * len(served["r"].token_ids)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_parameters_give_the_same_tokens_with_and_without_forced_ones(
    plain: EngineParts, forcing: EngineParts, data: st.DataObject
):
    sampling = st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.8, 2.0])},
        optional={
            "top_p": st.just(0.8),
            "repetition_penalty": st.just(1.3),
            "frequency_penalty": st.just(0.5),
            "min_tokens": st.integers(0, 30),
            "bad_words": st.just((" order",)),
            "logprobs": st.just(1),
            "logit_bias": st.just({60: 100.0, 61: -100.0}),
            "stop_token_ids": st.just((60, 61)),
        },
    )
    specs = []
    for i in range(4):
        params, seed = data.draw(sampling), data.draw(st.integers(0, 99))
        grammar, max_tokens = data.draw(st.sampled_from(GRAMMARS)), data.draw(st.integers(30, 60))
        bad = tuple(tuple(tokenizer().encode(word, add_special_tokens=False)) for word in params.get("bad_words", ()))
        specs.append(ask(f"r{i}", grammar, seed=seed, max_tokens=max_tokens, bad_word_token_ids=bad, **params))
    assert serve(forcing, specs) == alone(plain, specs)


def test_answers_are_the_same_alone_in_a_batch_in_chunks_and_preempted(plain: EngineParts):
    specs = [*a_mixture(), *samples("s", 3, ORDER, seed=5, temperature=1.5)]
    expected = alone(plain, a_mixture()) | serve(plain, specs[12:])
    with engine(max_num_batched_tokens=9, max_num_seqs=6) as narrow:
        assert serve(narrow, specs) == expected
    with engine(num_blocks=14, max_num_seqs=8) as small:
        assert serve(small, specs) == expected
        assert small.core.stats.num_preemptions > 0
    assert len({tuple(expected[f"s-{i}"].token_ids) for i in range(3)}) == 3


def test_a_resumed_request_goes_on_as_it_would_have(forcing: EngineParts):
    specs = a_mixture(4)
    whole = serve(forcing, specs)
    for cut in (1, 4, 11):
        had = {spec.request_id: whole[spec.request_id].token_ids[:cut] for spec in specs}
        resumed = [
            replace(spec, resumed=ResumePoint(output_token_ids=had[spec.request_id]))
            for spec in specs
            if len(whole[spec.request_id].token_ids) > cut
        ]
        for name, served in serve(forcing, resumed).items():
            assert had[name] + served.token_ids == whole[name].token_ids


def test_a_worker_that_is_killed_costs_no_token(forcing: EngineParts):
    expected = serve(forcing, a_mixture())

    def kill(number: int) -> None:
        pid = grammars_of(forcing).worker_pid
        if number in (1, 5) and pid is not None:
            os.kill(pid, signal.SIGKILL)

    assert serve(forcing, a_mixture(), before_step=kill) == expected


class Reciting:
    """Drafts what it knows a request to say, wrong at every seventh position (`proposer.Proposer`)."""

    name = "reciting"

    def __init__(self, known: Mapping[str, Served]) -> None:
        self._known = known
        self.num_asked_for_bound = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: DraftAsk) -> Sequence[int]:
        state: Any = ask.request
        self.num_asked_for_bound += state.grammar is not None
        first = state.tokens.size - state.num_prompt_tokens
        said = self._known[state.request_id].token_ids[first : first + ask.num_drafts]
        return [token if (first + i) % 7 else (token + 9) % 1536 for i, token in enumerate(said)]

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def drafting(plain: EngineParts) -> Iterator[tuple[EngineParts, dict[str, Served], Reciting]]:
    """An engine in which each row has drafts, what it is to say, and who drafts."""
    expected = serve(plain, a_mixture())
    with engine(forced_tokens=False) as parts:
        executor: Any = parts.core._executor
        executor.proposer = Reciting(expected)
        parts.core.scheduler.num_drafts = lambda request, num_rows: 4
        yield parts, expected, executor.proposer


def test_drafts_are_cut_at_the_masks_and_save_steps(drafting: tuple[EngineParts, dict[str, Served], Reciting]):
    parts, expected, proposer = drafting
    numbers: list[int] = []
    assert serve(parts, a_mixture(), before_step=numbers.append) == expected
    assert proposer.num_asked_for_bound > 10
    assert len(numbers) < max(len(served.token_ids) for served in expected.values()) / 2


def test_a_worker_that_is_killed_over_drafts_costs_no_token(
    drafting: tuple[EngineParts, dict[str, Served], Reciting],
):
    """Before they are told, or while the masks after them are made."""
    parts, expected, _ = drafting
    grammars, executor = grammars_of(parts), cast(Any, parts.core._executor)
    run, killed = executor.runner.run, list[int]()

    def kill(number: int) -> None:
        if number in (1, 6) and (pid := grammars.worker_pid) is not None:
            os.kill(pid, signal.SIGKILL)

    def run_and_kill(*words: Any) -> Any:
        if len(killed) < 2 and any(held.draft_masks for held in grammars._slots.values()):
            assert grammars.worker_pid is not None
            killed.append(grammars.worker_pid)
            os.kill(grammars.worker_pid, signal.SIGKILL)
            grammars._mapped().work_on(None)
        return run(*words)

    executor.runner.run = run_and_kill
    assert serve(parts, a_mixture()) == expected
    executor.runner.run = run
    assert len(set(killed)) == 2
    assert serve(parts, a_mixture(), before_step=kill) == expected


def test_a_worker_that_hangs_is_replaced():
    with engine() as parts:
        expected = serve(parts, a_mixture(4))
        grammars = grammars_of(parts)
        grammars._answer_s = 0.5
        stopped = grammars.worker_pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        assert serve(parts, a_mixture(4)) == expected
        assert grammars.worker_pid != stopped


def test_others_go_on_while_a_worker_does_not_answer():
    with engine() as parts:
        grammars = grammars_of(parts)
        grammars._command, grammars._start_s, grammars._answer_s = (sys.executable, "-c", "while True: pass"), 0.5, 0.1
        served = serve(parts, [ask("bound", WORD), ask("free", "", max_tokens=9)])
        assert list(served) == ["free", "bound"]
        assert served["free"].error is None
        assert served["bound"].error == "no process for grammars could be begun: it ended each time"


def test_an_answer_that_was_complete_when_its_engine_died_ends_without_another_token(forcing: EngineParts):
    whole = serve(forcing, [ask("r", ORDER)])["r"]
    resumed = ask("r", ORDER, resumed=ResumePoint(output_token_ids=whole.token_ids))
    assert serve(forcing, [resumed])["r"] == Served([], FinishReason.STOP, None)


def test_a_request_whose_matcher_ends_the_worker_twice_ends_alone(forcing: EngineParts):
    grammars = grammars_of(forcing)
    others = a_mixture(4)
    expected = serve(forcing, others)

    def kill_at_culprit(number: int) -> None:
        """As if the worker had been at this request when it died."""
        if number in (1, 2):
            slot = next(held.number for held in grammars._slots.values() if held.bound.grammar == culprit.grammar)
            assert grammars.worker_pid is not None
            os.kill(grammars.worker_pid, signal.SIGSTOP)
            os.kill(grammars.worker_pid, signal.SIGKILL)
            grammars._mapped().work_on(slot)

    culprit = ask("culprit", "start: /[a-z ]{40,50}/")
    served = serve(forcing, [*others, culprit], before_step=kill_at_culprit)
    assert served.pop("culprit").error == "the process for grammars ended each time that it worked on this request"
    assert served == expected


def test_a_grammar_that_cannot_be_used_ends_its_request_alone(forcing: EngineParts):
    served = serve(forcing, [ask("bad", HOPELESS), ask("good", WORD, seed=3)])
    assert served["bad"].finish_reason is FinishReason.ERROR
    assert "nobody" in (served["bad"].error or "")
    assert served["good"] == serve(forcing, [ask("good", WORD, seed=3)])["good"]


def test_a_matcher_out_of_fuel_ends_its_request_alone(forcing: EngineParts):
    hostile = 'start: /[a-z]{6}/ e\ne: e e e | e e | "a" | "b" | /[a-z]/'
    served = serve(forcing, [ask("hostile", hostile, min_tokens=59), ask("good", ORDER)])
    assert served["good"].finish_reason is FinishReason.STOP
    assert served["hostile"].finish_reason is FinishReason.ERROR
    assert "Too many items" in (served["hostile"].error or "")
    assert len(served["hostile"].token_ids) > 2


def test_thoughts_end_at_their_budget_inside_a_grammar(plain: EngineParts, forcing: EngineParts):
    mark = tokenizer().token_id("<|im_end|>")
    assert mark is not None
    grammar = 'start: /[a-z ]{1,300}/ <|im_end|> "done"'
    limit = ThinkingLimit(7, begin=(), end=(mark,), opened=True)
    for parts in (plain, forcing):
        # The model itself never ends its thoughts: only the budget does.
        spec = ask("r", grammar, thinking=limit, eos_token_ids=(), logit_bias={mark: -100.0})
        (served,) = serve(parts, [spec]).values()
        assert served.token_ids[7] == mark
        assert served.finish_reason is FinishReason.STOP
        assert tokenizer().decode(served.token_ids[8:]) == "done"


def test_the_torch_executor_binds_its_answers_too():
    with engine(executor="torch") as parts:
        served = serve(parts, [ask("order", ORDER), ask("long", LONG)])
    assert list(json.loads(served["order"].text)) == ["name", "price", "size"]
    assert served["long"].finish_reason is FinishReason.STOP


def test_a_worker_ends_with_its_executor():
    with engine() as parts:
        serve(parts, [ask("r", WORD)])
        pid = grammars_of(parts).worker_pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_without_such_requests_begins_no_worker():
    with engine() as parts:
        serve(parts, [ask("r", "")])
        assert grammars_of(parts).worker_pid is None
