"""What drafts bring: on against off, and the chosen number against the best one, in turns of one run.

    python benchmarks/bench_speculation.py SECTION ... [--proposers draft mtp] [--quick] [--turns 7] [--threads 1]

builtin     the built-in model and who drafts for it (`--proposers`), over the load; ngram on texts that do not repeat
copying     ngram, an answer that repeats its prompt, 1 and 8 requests
real        SmolLM2 on questions, documentation to go on with, and code to change, 1 and 8 requests; the last also with
            the code as prediction (`--loads`)
scripted    Qwen3-0.6B's shape (random weights, int8, context 512), a proposer whose acceptance is given: 0.8 and 0

Engines, or rules of one engine, take turns within one process, the order changes with each turn, and a turn is held
against the one of "off" beside it: printed are medians of these ratios of tokens a second. The core's loop is timed:
scheduler, executor and what they tell, without HTTP and detokenisation. Greedy; end-of-sequence is ignored. With one
thread, processor time is counted, by the engine too, so that a busy machine does not spoil the figures.

Aims at 1 / 8 / 32 requests: built-in with its draft 1.5 / 1.0 / 0.97, ngram there 0.97; copying 1.25; real 1.0 each;
scripted at 0.8 2.2 / 1.35 / 1.05, at 0 0.97.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, product, zip_longest
from pathlib import Path
from pydoc_data import topics
from random import Random
from textwrap import dedent
from typing import Any, NamedTuple

from harness import make_checkpoint
from live_engine import CpuClock
from quality import PROMPTS, prompt_ids

from maitred import LLM, SamplingParams
from maitred.engine.intake import make_requests
from maitred.engine.step_meter import StepMeter
from maitred.executor.state import DraftAsk
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.speculation import Speculation
from maitred.sim.engine import chance

WARM_UP_S = 1.0
AT_ONCE: dict[int, Callable[[int], int] | None] = {1: lambda ended: 1, 8: None}  # of 8 prompts
CODE = (
    *(HelpFormatter._expand_help, HelpFormatter._format_args, HelpFormatter._format_action_invocation),
    *(ArgumentParser._match_argument, ArgumentParser._match_arguments_partial, ArgumentParser._get_value),
    *(ArgumentParser.format_help, json.JSONEncoder.encode),
)
ids = count()


class Scripted:
    """A proposer that knows what comes, and says it with a given chance."""

    name = "scripted"

    def __init__(self) -> None:
        self.acceptance, self.outputs = 0.0, dict[tuple[int, ...], list[int]]()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: DraftAsk) -> Sequence[int]:
        tokens, prompt = ask.request.tokens.array, ask.request.num_prompt_tokens
        coming, at = self.outputs[tuple(tokens[:8].tolist())], len(tokens) - prompt
        return [
            token if chance(ask.request.request_id, at + i) < self.acceptance else token ^ 1
            for i, token in enumerate(coming[at : at + ask.num_drafts])
        ]

    def forget(self, request_id: str) -> None: ...
    def close(self) -> None: ...


class Engine(NamedTuple):
    """An LLM's engine with a rule of its own for the number of drafts; None drafts nothing."""

    llm: LLM
    rule: Any
    meter: StepMeter | None  # tells the rule what steps cost

    @property
    def core(self) -> EngineCore:
        core = self.llm._open().core
        core.scheduler._speculation = self.rule  # type: ignore[attr-defined]
        others = [each for each in core.moments.listeners if not isinstance(each, StepMeter)]
        core.moments.listeners = [*others, *([self.meter] if self.meter is not None else [])]
        core.moments.find()
        if self.meter is not None:
            self.meter.begin(core)
        return core

    def serve(
        self,
        prompts: Sequence[Any],
        tokens: int,
        at_once: Any = None,
        temperature: float = 0.0,
        predictions: Sequence[str] = (),
        ignore_eos: bool = True,
    ) -> float:
        """Tokens a second; `at_once(number ended)` at a time, all of them without."""
        core, parts = self.core, self.llm._open()
        sampling = SamplingParams(temperature=temperature, seed=0, max_tokens=tokens, ignore_eos=ignore_eos)
        coming = [
            spec
            for prompt, text in zip_longest(prompts, predictions, fillvalue="")
            for spec in make_requests(
                parts.model, prompt, sampling, request_id=f"b{next(ids)}", now=0.0, prediction=text
            )
        ][::-1]
        now = core.clock.now
        began, num_tokens, running, ended = now(), 0, 0, 0
        while coming or core.has_work:
            while coming and (at_once is None or running < at_once(ended)):
                core.add(coming.pop())
                running += 1
            for progress in core.step():
                num_tokens += len(progress.new_token_ids)
                if progress.finish_reason is not None:
                    running, ended = running - 1, ended + 1
        return num_tokens / (now() - began)


def report(what: str, engines: dict[str, Engine], turns: int, turn: Callable[[Engine], float]) -> None:
    """Prints for each the median of its ratios to the first one; a second of turns warms each up."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    drafts = {name: [0, 0] for name in engines}
    for engine in engines.values():
        clock = engine.core.clock
        until = clock.now() + WARM_UP_S
        while clock.now() < until:
            turn(engine)
    for number in range(turns):
        for name in list(engines)[:: -1 if number % 2 else 1]:
            before = drafted(engines[name])
            rates[name].append(turn(engines[name]))
            drafts[name] = [
                d + now - then for d, now, then in zip(drafts[name], drafted(engines[name]), before, strict=True)
            ]
    first = rates[next(iter(engines))]
    for name, found in rates.items():
        made, right = drafts[name]
        ratio = statistics.median(a / b for a, b in zip(found, first, strict=True))
        share = f"{right / made:.0%} of {made} drafts accepted" if made else ""
        print(f"{what:22} {name:12} {statistics.median(found):9,.0f} tokens/s {ratio:6.3f}  {share}", flush=True)


def drafted(engine: Engine) -> tuple[int, int]:
    stats = engine.core.stats
    counts = stats.drafts, stats.predicted_drafts
    return sum(drafts.num_tokens for drafts in counts), sum(drafts.num_accepted for drafts in counts)


def make_llm(options: argparse.Namespace, speculative: str, model: str, **settings: Any) -> LLM:
    llm = LLM(model, speculative=speculative, num_threads=options.threads, max_num_seqs=64, **settings)
    core: Any = llm._open().core
    if options.threads == 1:
        core.clock = CpuClock()
        core._executor._clock = core.clock.now
    return llm


def own_engine(options: argparse.Namespace, speculative: str, model: str = "maitred-mini") -> Engine:
    llm = make_llm(options, speculative, model)
    core: Any = llm._open().core
    meter = next((each for each in core.moments.listeners if isinstance(each, StepMeter)), None)
    return Engine(llm, core.scheduler._speculation, meter)


def counting(number: int) -> list[str]:
    """Questions that the built-in model was trained to answer."""
    return [chat(f"Count from {1 + i} to {30 + i}.") for i in range(number)]


def chat(question: str) -> str:
    return f"<|bos|><|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def stories(number: int) -> list[str]:
    return [chat(f"Write a story about number {17 * i + 3} and the sea.") for i in range(number)]


def builtin(options: argparse.Namespace) -> None:
    engines = {name: own_engine(options, name) for name in ("off", *options.proposers)}
    for number in (1, 8, 32) if options.quick else (1, 2, 4, 8, 16, 32):
        turn = partial(Engine.serve, prompts=counting(number), tokens=112)
        report(f"{number} counting", engines, options.turns, turn)
    engines = {"off": engines["off"], "ngram": own_engine(options, "ngram")}
    for number in (1, 8, 32):
        turn = partial(Engine.serve, prompts=stories(number), tokens=160, temperature=1.0)
        report(f"{number} not repeating", engines, options.turns, turn)


def copying(options: argparse.Namespace) -> None:
    """Who asks again is answered again: the answer stands in the prompt."""
    engines = {"off": own_engine(options, "off"), "ngram": own_engine(options, "ngram")}
    sampling = SamplingParams(temperature=0.0, max_tokens=112)
    again = []
    for question in counting(8):
        answer = engines["off"].llm.generate([question], sampling)[0].outputs[0].text
        again.append(f"{question}{answer}<|im_end|>\n{question.removeprefix('<|bos|>')}")
    for number, at_once in AT_ONCE.items():
        turn = partial(Engine.serve, prompts=again, tokens=112, at_once=at_once)
        report(f"{number} copying", engines, options.turns, turn)


def real(options: argparse.Namespace) -> None:
    """Greedy, 8 prompts of a kind, to the model's own end or 128 tokens."""
    engines = {name: own_engine(options, name, "smollm2") for name in ("off", "auto")}
    llm = engines["off"].llm
    encode, names = llm.get_tokenizer().encode, sorted(topics.topics)
    documents = [encode(topics.topics[name])[:256] for name in names[: 4 * 8 : 4]]
    codes = [dedent(inspect.getsource(function)) for function in CODE]
    edits = [
        prompt_ids(llm, f"```python\n{code}```\nWrite this code again and rename `self` to `this`.") for code in codes
    ]
    loads: dict[str, dict[str, Any]] = {
        "questions": {"prompts": [prompt_ids(llm, question) for question in PROMPTS[:8]]},
        "documentation": {"prompts": documents},
        "code": {"prompts": edits},
        "predicted": {"prompts": edits, "predictions": [f"```python\n{code}```" for code in codes]},
    }
    for load, (number, at_once) in product(options.loads or loads, AT_ONCE.items()):
        turn = partial(Engine.serve, tokens=128, at_once=at_once, ignore_eos=False, **loads[load])
        report(f"{number} {load}", engines, options.turns, turn)


def scripted(options: argparse.Namespace) -> None:
    """32 prompts in the prefix cache, and what follows them; with --quick of the built-in model."""
    context, tokens, random, proposer = 128 if options.quick else 512, 64, Random(0), Scripted()
    prompts = [[random.randrange(3, 250) for _ in range(context)] for _ in range(32)]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        model = "maitred-mini" if options.quick else str(make_checkpoint(Path(folder) / "model"))
        settings = {"dtype": "int8", "weight_cache": "off", "num_speculative_tokens": 8}
        llm = make_llm(options, "ngram", model, max_model_len=2 * context, **settings)
    off = Engine(llm, None, None)
    executor: Any = off.core._executor
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        proposer.outputs[tuple(prompt[:8])] = list(output.outputs[0].token_ids)
    executor.proposer = proposer
    for proposer.acceptance in (0.8, 0.0):
        drafting = Engine(llm, Speculation(5), StepMeter())
        for number in (1, 8, 32):
            turn = partial(Engine.serve, prompts=prompts[:number], tokens=tokens)
            report(
                f"{number} at {context}", {"off": off, f"accepts {proposer.acceptance}": drafting}, options.turns, turn
            )
    llm.close()


SECTIONS = {section.__name__: section for section in (builtin, copying, real, scripted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--proposers", nargs="*", default=["draft"], help="for the built-in model: draft, mtp, ngram")
    parser.add_argument("--loads", nargs="*", help="for real: questions, documentation, code, predicted")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="the built-in model, three turns, fewer cells")
    options = parser.parse_args()
    options.turns = min(options.turns, 3) if options.quick else options.turns
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    for name in options.sections:
        print(f"-- {name}")
        SECTIONS[name](options)


if __name__ == "__main__":
    main()
