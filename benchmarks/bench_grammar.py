"""What grammars cost, and what forced tokens give: the shape of Qwen3-0.6B with random weights, a real vocabulary.

    python benchmarks/bench_grammar.py TEKKEN [--requests 1 32] [--steps 12] [--turns 3] [--threads 1]

TEKKEN is a tekken*.json, of the package mistral-common. Random weights write no JSON worth the name, so sampled tokens
are put in the place of those of real function arguments; every step computes, masks and samples as ever. Turns with and
without follow each other. Prints the ratio of medians over steps, by the clock and by processor time (the worker's
included), since a shared machine lends its processors to others.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import tokenizers
from harness import QWEN3_06B, make_checkpoint
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.request import RequestSpec, SamplingParams
from maitred.engine.build import EngineParts, build_parts
from maitred.executor.grammar import Grammars
from maitred.text import Tokenizer
from maitred.text.bounds import byte_alphabet

VOCAB, NUM_SPECIAL = 131072, 1000
SPACED = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Call(NamedTuple):
    """A function's schema, and arguments for it."""

    properties: Mapping[str, Any]
    arguments: Mapping[str, Any]

    @property
    def grammar(self) -> str:
        schema = {
            "type": "object",
            "properties": self.properties,
            "required": list(self.properties),
            "additionalProperties": False,
            "x-guidance": SPACED,
        }
        return json.dumps({"grammars": [{"json_schema": schema}]})


TEXT = {"type": "string"}
CALLS = [
    Call(
        {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}, "num_days": {"type": "integer"}},
        {"location": "Reykjavik, Iceland", "unit": "celsius", "num_days": 5},
    ),
    Call(
        {"query": TEXT, "max_results": {"type": "integer"}, "archived": {"type": "boolean"}, "language": TEXT},
        {
            "query": "report of the northern branch",
            "max_results": 20,
            "archived": False,
            "language": "en",
        },
    ),
    Call(
        {
            "customer_name": TEXT,
            "table_number": {"type": "integer"},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"dish": TEXT, "quantity": {"type": "integer"}},
                    "required": ["dish", "quantity"],
                    "additionalProperties": False,
                },
            },
        },
        {
            "customer_name": "Ada Lovelace",
            "table_number": 12,
            "items": [{"dish": "onion soup", "quantity": 2}, {"dish": "apple tart", "quantity": 1}],
        },
    ),
    Call(
        {"title": TEXT, "start_time": TEXT, "end_time": TEXT, "attendees": {"type": "array", "items": TEXT}},
        {
            "title": "Review of the design",
            "start_time": "2026-03-04T10:00:00Z",
            "end_time": "2026-03-04T11:30:00Z",
            "attendees": ["grace@example.org", "alan@example.org"],
        },
    ),
]


def heavy() -> Call:
    """Many optional ways at every position: patterns, alternatives, nested arrays."""
    leaf = {
        "anyOf": [
            {"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"},
            {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9:]{8}Z)?$"},
            {"type": "number"},
            {"type": "array", "items": {"type": "string", "maxLength": 60}},
        ]
    }
    properties = {f"{word}_{i}": leaf for i, word in enumerate(("name", "date", "place", "amount", "tags", "note") * 4)}
    values = ["Ada King Lovelace", "2026-03-04T10:00:00Z", "Reykjavik", 12.75, ["a b", "long words here"], "Seen"] * 4
    return Call(properties, dict(zip(properties, values, strict=True)))


# ---- the model


def write_model(folder: Path, tekken: Path) -> None:
    """Random weights: the time of a step does not depend on them."""
    make_checkpoint(folder, QWEN3_06B | {"vocab_size": VOCAB, "eos_token_id": 2})
    (folder / "tokenizer_config.json").unlink()
    tokenizer_of(json.loads(tekken.read_text())).save(str(folder / "tokenizer.json"))


def tokenizer_of(tekken: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Tekken's ranks as a byte-level BPE: a merge for each way of making a token of two others, in order of rank."""
    letters = byte_alphabet()
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in tekken["vocab"][: VOCAB - NUM_SPECIAL]}
    merges = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        made_of = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, *halves) for halves in made_of]
    named = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocab = {named[token]: rank + NUM_SPECIAL for token, rank in ranks.items()}
    pairs = [(named[a], named[b]) for _, _, _, a, b in sorted(merges)]
    special = {f"<SPECIAL_{i}>": i for i in range(NUM_SPECIAL)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=special | vocab, merges=pairs, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    split = pre_tokenizers.Split(Regex(tekken["config"]["pattern"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---- running


class Script:
    """Puts a token of a request's script in the place of the sampled one, after all that sampling costs."""

    def __init__(self, executor: Any, tokenizer: Tokenizer) -> None:
        self.texts: dict[int, str] = {}  # by seed
        self._executor, self._tokenizer = executor, tokenizer
        sample_rows = executor._sample_rows

        def scripted(logits_RV: Any, samplers: Sequence[Any]) -> list[Any]:
            sampled = sample_rows(logits_RV, samplers)
            seeds = [sampler.seed for sampler in samplers]
            return [t._replace(token_id=self._next(seed), error=None) for t, seed in zip(sampled, seeds, strict=True)]

        executor._sample_rows = scripted

    def _next(self, seed: int) -> int:
        """The text begins anew at its end."""
        written = self._tokenizer.decode(self._executor._states[f"r{seed}"].output(), skip_special_tokens=False)
        text = self.texts[seed]
        return self._tokenizer.encode(text[len(written) % len(text) :], add_special_tokens=False)[0]


class Bench:
    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.executor: Any = parts.core._executor
        self.script = Script(self.executor, parts.model.tokenizer)
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []
        self._number = 0

    @property
    def grammars(self) -> Grammars:
        grammars: Grammars = self.executor.grammars
        return grammars

    def specs(self, calls: Sequence[Call], num_requests: int, *, bound: bool, max_tokens: int) -> list[RequestSpec]:
        made = []
        for i in range(num_requests):
            call = calls[i % len(calls)]
            self._number += 1
            text = json.dumps(call.arguments, ensure_ascii=False)
            tokens = self.parts.model.tokenizer.encode(text, add_special_tokens=False)
            self.script.texts[self._number] = text
            prompt = [5000 + self._number, *range(2000, 2063)]
            made.append(
                RequestSpec(
                    request_id=f"r{self._number}",
                    arrived_at=0.0,
                    num_prompt_tokens=len(prompt),
                    max_tokens=min(max_tokens, len(tokens)),
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(temperature=0.7, top_p=0.95, max_tokens=max_tokens, ignore_eos=True),
                    seed=self._number,
                    grammar=call.grammar if bound else "",
                )
            )
        return made

    def compile(self, calls: Sequence[Call]) -> None:
        for call in calls:
            done = threading.Event()
            self.grammars.prepare(call.grammar, lambda error, done=done: (done.set(), print(error, end=""))[0])
            done.wait()

    def run(self, specs: Sequence[RequestSpec], after_step: Callable[[], None] = lambda: None) -> int:
        """Tokens given. Times of steps in which all decode go to `step_s` and `cpu_s`."""
        core, num_tokens, rows = self.parts.core, 0, len(specs)
        for spec in specs:
            core.add(spec)
        while core.has_work:
            all_decode = len(core.scheduler._state.decoding) == rows
            began, cpu = time.perf_counter(), self._cpu_s()
            progress = core.step()
            if all_decode:
                self.step_s.append(time.perf_counter() - began)
                self.cpu_s.append(self._cpu_s() - cpu)
                num_tokens += sum(len(told.new_token_ids) for told in progress)
            failed = [told.error for told in progress if told.error]
            assert not failed, failed
            after_step()
        return num_tokens

    def _cpu_s(self) -> float:
        pid = self.grammars.worker_pid
        times = psutil.Process(pid).cpu_times() if pid is not None else None
        return time.process_time() + (times.user + times.system if times is not None else 0.0)

    def timed(self, specs: Sequence[RequestSpec]) -> tuple[float, float, int]:
        """Median step (s), processor time a step (s), and tokens a step times 1,000."""
        self.step_s, self.cpu_s = [], []
        num_tokens = self.run(specs)
        steps = max(len(self.step_s), 1)
        return statistics.median(self.step_s), sum(self.cpu_s) / steps, 1000 * num_tokens // steps


def masks(bench: Bench, name: str, calls: Sequence[Call], num_requests: int, options: argparse.Namespace) -> None:
    """A step with masks over one without; nothing is forced."""
    bench.grammars._forces = False
    turns = []
    for _ in range(options.turns):
        without, with_masks = (
            bench.timed(bench.specs(calls, num_requests, bound=bound, max_tokens=options.steps))
            for bound in (False, True)
        )
        turns.append((with_masks[0] / without[0], with_masks[1] / without[1], 1e3 * without[0]))
    wall, cpu, step_ms = (statistics.median(column) for column in zip(*turns, strict=True))
    print(
        f"masks, {name:6} {num_requests:3} requests: step x {wall:.3f}, processor x {cpu:.3f} "
        f"({step_ms:.1f} ms without)"
    )


def forced(bench: Bench, num_requests: int, options: argparse.Namespace) -> None:
    """Tokens a second of function arguments over those of free text."""
    bench.grammars._forces = True
    turns = []
    for _ in range(options.turns):
        rates = []
        for bound in (False, True):
            bench.step_s, bench.cpu_s = [], []
            num_tokens = bench.run(bench.specs(CALLS, num_requests, bound=bound, max_tokens=400))
            rates.append((num_tokens / sum(bench.step_s), num_tokens / sum(bench.cpu_s)))
        turns.append([b / a for a, b in zip(*rates, strict=True)])
    wall, cpu = (statistics.median(column) for column in zip(*turns, strict=True))
    print(f"forced tokens, {num_requests:3} requests: tokens/s x {wall:.2f}, tokens per processor second x {cpu:.2f}")


def first_schema(bench: Bench) -> None:
    """The longest step of 8 free streams, while the first grammar comes; the worker begins with it."""
    assert bench.grammars.worker_pid is None
    free = bench.specs([heavy()], 8, bound=False, max_tokens=200)
    (bound,) = bench.specs(CALLS[:1], 1, bound=True, max_tokens=40)
    ready, num_steps, asked_at, waited_s = threading.Event(), 0, 0.0, 0.0

    def ask() -> None:
        nonlocal num_steps, asked_at, waited_s
        num_steps += 1
        if num_steps == 20:
            asked_at = time.perf_counter()
            bench.grammars.prepare(bound.grammar, lambda error: ready.set())
        if ready.is_set() and not waited_s:
            waited_s = time.perf_counter() - asked_at
            bench.parts.core.add(bound)

    bench.step_s = []
    bench.run(free, ask)
    before, after = bench.step_s[:19], bench.step_s[19:]
    median = statistics.median(bench.step_s)
    print(
        f"first schema beside 8 streams: it waited {waited_s:.2f} s for its grammar; longest step "
        f"{1e3 * max(after):.0f} ms, before {1e3 * max(before):.0f} ms, median {1e3 * median:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tekken", type=Path, nargs="?")
    parser.add_argument("--model", type=Path, help="folder for the model, kept; a temporary one without")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--steps", type=int, default=12, help="of each turn with masks")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int, default=1, help="two of them wait for each other, which counts too")
    options = parser.parse_args()
    if options.tekken is None:
        print("no vocabulary: TEKKEN is a tekken*.json of the package mistral-common")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary) / "model"
        if not (folder / "model.safetensors").exists():
            write_model(folder, options.tekken)
        config = EngineConfig(
            model=ModelConfig(
                model=str(folder),
                dtype=options.dtype,
                max_model_len=1024,
                num_threads=options.threads,
                weight_cache="off",
            ),
            scheduler=SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=512),
        )
        parts = build_parts(config, on_event=print, clock=WallClock())
        bench = Bench(parts)
        first_schema(bench)
        bench.compile([*CALLS, heavy()])
        for num_requests in options.requests:
            masks(bench, "simple", CALLS, num_requests, options)
            masks(bench, "heavy", [heavy()], num_requests, options)
            forced(bench, num_requests, options)
        parts.close()


if __name__ == "__main__":
    main()
