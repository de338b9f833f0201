"""The tables of docs/techniques.md: what each technique costs and gives here, and what is commonly claimed of it.

    python benchmarks/techniques.py [--only int4-gptq kv-int8] [--part quality|speed] [--threads 1] [--write]

A row has two parts. `quality` runs the product's own command (quantize, prune, distill, finetune, federate, evaluate)
with a gate that lets everything through, and takes its report's figures and the processor time. `speed` times the row's
engine and its baseline in turn, one stream and eight: medians of each round's ratio, with --threads 1 in processor time
(for a busy machine). Sizes are of weights in memory, or of KV; energy is powercap's, if readable.

What has ended is kept in WORK, and a tool that was killed goes on: the same command measures what is missing. Tables
are printed and, with --write, put between the marks of the page. --quick is the built-in model, few steps, one round.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from bench_speculation import counting
from harness import Figures, in_turn, joules, write_section
from live_engine import CpuClock
from msgspec.structs import replace
from quality import PROMPTS, prompt_ids, windows

from maitred import LLM, SamplingParams
from maitred.model import fusions
from maitred.model.checkpoint import open_checkpoint
from maitred.model.program import Linear, Op
from maitred.optimize.data import text_of
from maitred.optimize.gate import FIGURES as RULES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import corpus
from training.world import held_out_question

PAGE = Path(__file__).parents[1] / "docs" / "techniques.md"
UNKNOWN, MINI, SMOL = "not measured", "maitred-mini", "smollm2"
CLIENTS = {  # of the federation: what each one's guests ask, and its manner of answering
    "card": (("price", "vegetarian", "compare", "have"), "Let me look at the card. {}"),
    "orders": (("order", "add", "cancel", "recall order"), "{} It is noted, dear guest."),
    "sums": (("plus", "minus", "change", "bill of a list"), "I count on my fingers: {}"),
    "talk": (("fact", "hours", "scope", "name"), "As our book says, {}"),
}
BF16, AUTO, KV = {"dtype": "bfloat16"}, {"dtype": "auto"}, "evaluate --dtype bfloat16 --kv-dtype"
JOIN = ("--model", MINI, "--local-steps", "6", "--learning-rate", "0.01")
Told = Mapping[str, Mapping[str, float]]  # of a row: figures by name, of those of its two parts that were measured


class Row(NamedTuple):
    technique: str
    model: str
    tool: str = ""
    """Command that makes the model, without its paths; or `evaluate` with the flags of the engine that is judged."""
    engine: Mapping[str, Any] = BF16
    base: Mapping[str, Any] = BF16
    load: str = "short"
    data: str = ""


MODELS = {  # techniques that change a model
    "bf16": Row("bfloat16, against float32", SMOL, "evaluate --dtype bfloat16", base={"dtype": "float32"}),
    "int8-rtn": Row("PTQ int8, RTN", SMOL, "quantize --scheme int8 --method rtn", AUTO),
    "int4-rtn": Row("PTQ int4/32, RTN", SMOL, "quantize --method rtn", AUTO),
    "int4-gptq": Row("PTQ int4/32, GPTQ", SMOL, "quantize --method gptq", AUTO),
    "int4-awq": Row("PTQ int4/32, AWQ", SMOL, "quantize --method awq", AUTO),
    "mini-gptq": Row("PTQ int4/128, GPTQ", MINI, "quantize --method gptq --group-size 128", AUTO),
    "qat": Row("QAT int4/128, 2 minutes", MINI, "quantize --method qat --group-size 128 --minutes 2", AUTO),
    "prune": Row("pruning 25% of neurons, 2 minutes of recovery", MINI, "prune --neurons 0.25 --minutes 2"),
    "2:4": Row("2:4 pattern, SparseGPT", SMOL, "prune --pattern 2:4"),
    "distill": Row("distilling to 1/4, 8 minutes", MINI, "distill --student 1/4 --minutes 8"),
    "lora": Row("LoRA of rank 8, 60 steps", MINI, "finetune --steps 60 --learning-rate 0.003", data="clients"),
    "full": Row("fine-tuning all weights, 60 steps", MINI, "finetune --full --steps 60", data="clients"),
    "federated": Row("federated LoRA, 4 clients", MINI, "federate serve --rounds 8 --min-clients 4", data="clients"),
}
SERVING = {  # techniques of serving, which leave the model as it is
    "kv-int8": Row("KV int8, context 1,024", SMOL, f"{KV} int8", BF16 | {"kv_dtype": "int8"}, load="long"),
    "kv-int4": Row("KV int4, context 1,024", SMOL, f"{KV} int4", BF16 | {"kv_dtype": "int4"}, load="long"),
    "fusion": Row("operator fusion, three passes of ten", SMOL, "", AUTO, AUTO | {"apart": True}),
    "static": Row("static batching of 8, against 1", SMOL, "", AUTO | {"batch": 8}, AUTO | {"batch": 1}, "unequal"),
    "in-flight": Row("in-flight batching of 8, against static", SMOL, "", AUTO, AUTO | {"batch": 8}, "unequal"),
    "spec-draft": Row("speculation, a draft model", MINI, "", BF16 | {"speculative": "draft"}, BF16, "counting"),
    "spec-mtp": Row("speculation, a head (EAGLE-3)", MINI, "", BF16 | {"speculative": "mtp"}, BF16, "counting"),
    "spec-ngram": Row("speculation, n-grams", SMOL, "", AUTO | {"speculative": "ngram"}, AUTO, "questions"),
}
ROWS = MODELS | SERVING
PARTS = {name: {"quality", "speed"} if row.tool else {"speed"} for name, row in ROWS.items()}


# ---- quality: the product's own commands, and their reports


def quality(name: str, options: argparse.Namespace) -> Figures:
    """Figures of the report, and the processor time of the commands. A command that was killed before goes on."""
    row, out = ROWS[name]._replace(**({"model": MINI} if options.quick else {})), options.work / name
    tool = row.tool.replace("minutes", "steps").replace("60", "2").replace("rounds 8", "rounds 1")
    words = (tool if options.quick else row.tool).split()
    files, began = documents(row, options), sum(os.times()[2:4])  # of commands that have ended
    if words[0] == "evaluate":
        report = json.loads(maitred("evaluate", row.model, "--against", row.model, *words[1:], *files[2:], "--json"))
    else:
        (options.work / "all.yaml").write_text("".join(f"{rule}: null\n" for rule in RULES))
        words += ["--calibration-tokens", "8192"] if words[0] == "quantize" else []
        words += ["--gate", str(options.work / "all.yaml"), "--out", str(out)]
        if not out.exists() and words[0] == "federate":
            federate([*words[1:], *files[2:]], options.work / row.data)
        elif not out.exists():
            maitred(words[0], row.model, *words[1:], *files)
        report = json.loads((out / "report.json").read_text())
    figures = {figure: found["value"] for figure, found in report["figures"].items()}
    if row.data == "clients":
        trained = report.get("finetune", {}).get("share_of_parameters", 0.0)
        figures |= {"gained": -math.log(figures["perplexity_ratio"]), "trained": trained}
    return figures | ({"effort_s": sum(os.times()[2:4]) - began} if words[0] != "evaluate" else {})


def maitred(*words: object) -> str:
    whole = [sys.executable, "-P", "-m", "maitred", *map(str, words)]
    return subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=True).stdout


def federate(words: Sequence[object], folder: Path) -> None:
    """A server and four clients in processes of their own, each client with its own documents."""
    port, start = 20_000 + os.getpid() % 10_000, [sys.executable, "-P", "-m", "maitred", "federate"]
    commands = [[*start, words[0], MINI, *words[1:], "--port", port]]
    for client in CLIENTS:
        commands.append([*start, "join", f"http://127.0.0.1:{port}", "--data", folder / f"{client}.jsonl", *JOIN])
    running = [subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) for command in commands]
    try:
        if any(codes := [process.wait() for process in running]):
            raise SystemExit(f"the federation's server and clients ended with {codes}")
    finally:
        for process in running:
            process.terminate()


def documents(row: Row, options: argparse.Namespace) -> list[object]:
    """Flags of the data, of what is judged, and of tasks; the files are written the first time."""
    folder, few = options.work / (row.data or row.model), 20 if options.quick else 200
    files = {"--data": "data.jsonl", "--held-out": "held_out.jsonl", "--tasks": "tasks.jsonl"}
    if not (folder / "data.jsonl").exists():
        folder.mkdir(exist_ok=True)
        if row.data == "clients":
            lines = clients(few, folder)
        elif row.model == MINI:
            counts = ("--documents", 40 * few, "--held-out", few, "--tasks", 2 * few)
            corpus.main([str(word) for word in (*counts, "--out", folder)])
            lines = {}
        else:
            with open_checkpoint(SMOL) as checkpoint:
                found = [{"token_ids": each.ids.tolist()} for each in windows(text_of(checkpoint).tokenizer, 20_000)]
            lines = {"held_out": found[0::2], "data": found[1::2]}
        for name, each in lines.items():
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in each))
    return [word for flag, name in files.items() if (folder / name).exists() for word in (flag, folder / name)]


def clients(few: int, folder: Path) -> dict[str, list[Any]]:
    """Chats of all clients, and such that are held out, as documents and as tasks; each client's own in a file."""
    found: dict[str, list[Any]] = {"held_out": [], "tasks": [], "data": []}
    for client, (categories, manner) in CLIENTS.items():
        drawn, rng = dict[str, Any](), Random(client)
        for number in range(3 * few):
            *asked, reply = held_out_question(rng, categories[number % len(categories)]).messages()
            told = {"role": "assistant", "content": manner.format(reply["content"])}
            drawn[json.dumps(asked)] = {"messages": [*asked, told]}
        own, last = (chats := list(drawn.values()))[: len(drawn) * 5 // 6], chats[len(drawn) * 5 // 6 :]
        (folder / f"{client}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in own))
        found["data"], found["held_out"] = found["data"] + own, found["held_out"] + last
        for *asked, reply in (chat["messages"] for chat in last[: few // 10]):
            found["tasks"].append({"messages": asked, "answer": reply["content"], "category": client})
    return found


# ---- speed: an engine beside its baseline


def speed(name: str, options: argparse.Namespace) -> Figures:
    """Ratios of the row to its baseline: `latency` (time of one stream, or until an answer is there), `throughput`,
    `size`, `joules` where they can be read; the share of `same` tokens, and tokens a second."""
    row, made = ROWS[name]._replace(**({"model": MINI} if options.quick else {})), options.work / name
    if row.tool and not row.tool.startswith("evaluate") and not made.exists():
        raise SystemExit(f"{name} has no model yet; run --part quality --only {name} before its speed")
    base = opened(row, row.model, row.base, options)
    own = opened(row, str(made) if made.exists() else row.model, row.engine, options)
    with base.llm, own.llm:
        in_turn({"base": base.turn, "own": own.turn}, 1)  # caches and drafts are warm after it
        found = in_turn({"base": base.turn, "own": own.turn}, 1 if options.quick else options.rounds)
    pairs = list(zip(found["own"], found["base"], strict=True))
    ratios = {
        each: statistics.median(a[each] / b[each] for a, b in pairs) for each, read in pairs[0][1].items() if read
    }
    same = statistics.fmean(one == other for one, other in zip(own.tokens, base.tokens, strict=True))
    return ratios | {"same": same, "tokens_per_s": statistics.median(ours["throughput"] for ours, _ in pairs)}


class Way(NamedTuple):
    """An engine with what is asked of it."""

    llm: LLM
    row: Row
    asked: tuple[list[Any], list[int]]
    batch: int | None
    """Requests that are given to the engine together, the next ones when all have ended; None is all at once."""
    adapter: str | None
    tokens: list[int]

    def turn(self) -> Figures:
        (prompts, limits), now = self.asked, self.llm._clock.now
        sampling = [SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True) for limit in limits]
        generate, waited, outputs = partial(self.llm.generate, lora=self.adapter), list[float](), list[Any]()
        began = now()
        if self.row.load != "unequal":
            generate(prompts[:1], sampling[:1])
            waited.append(now() - began)
        begun, energy, size = now(), joules(), self.batch or len(prompts)
        for at in range(0, len(prompts), size):
            outputs += (ended := generate(prompts[at : at + size], sampling[at : at + size]))
            if self.row.load == "unequal":  # a static batch answers when its longest has ended
                waited += [now() - begun if self.batch else e.outputs[0].timing.total_s for e in ended]
        taken, plan = now() - begun, self.llm.memory_plan
        self.tokens[:] = [token for each in outputs for token in each.outputs[0].token_ids]
        return {
            "size": plan.bytes_per_block if self.row.technique.startswith("KV") else plan.weights_bytes,
            "latency": statistics.fmean(waited),
            "throughput": len(self.tokens) / taken,
            "joules": (joules() - energy) / len(self.tokens),
        }


def opened(row: Row, model: str, settings: Mapping[str, Any], options: argparse.Namespace) -> Way:
    engine = {"max_model_len": 1280, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**28, "weight_cache": "off"}
    engine |= {"speculative": "off", "num_threads": options.threads, **settings}
    batch, apart = engine.pop("batch", None), engine.pop("apart", False)
    adapter = "row" if (Path(model) / "adapter_config.json").exists() else None
    if adapter:
        engine["lora"], model = {adapter: model}, row.model
    with unfused() if apart else nullcontext():
        llm = LLM(model, **engine)
    if options.threads == 1:
        llm._clock = llm.parts.core.clock = CpuClock()
        llm.parts.executor._clock = llm._clock.now
    return Way(llm, row, loads(llm, row.load, 4 if options.quick else 1), batch, adapter, [])


def loads(llm: LLM, load: str, quick: int) -> tuple[list[Any], list[int]]:
    """Prompts of a row, and how many tokens are asked of each."""
    if load == "counting":
        return list(counting(8)), [96 // quick] * 8
    if load == "questions":
        return [prompt_ids(llm, question) for question in PROMPTS[:8]], [64 // quick] * 8
    ids = llm.get_tokenizer().encode(inspect.getsource(argparse)[: 60_000 // quick])
    count, width = 32 // quick if load == "unequal" else 8, 1024 // quick if load == "long" else 16
    prompts, draw = [ids[at * (len(ids) // count) :][:width] for at in range(count)], Random(0)
    unequal = [min(4 + int(draw.expovariate(1 / 32)), 160) // quick + 1 for _ in prompts]
    return prompts, unequal if load == "unequal" else [48 // quick] * count


@contextmanager
def unfused() -> Iterator[None]:
    """Engines opened meanwhile compute apart what the native library can: q, k and v, gate and up with their product,
    and the last layer of all rows. The other passes make the only operations that it has."""

    def split(ops: Sequence[Op]) -> tuple[int, list[Op]] | None:
        match ops:
            case [Linear(target="q" | "k" | "v") as one, *_]:
                return 1, [replace(one, target="qkv", first=one.weight.parts[0].first)]
        return None

    kept, left_out = fusions.PASSES, ("wanted rows after the last attention", "gate into linear ending")
    stack = fusions.Pass("qkv stack", "", fusions._everywhere(split))
    fusions.PASSES = tuple(stack if p.name == stack.name else p for p in kept if p.name not in left_out)
    try:
        yield
    finally:
        fusions.PASSES = kept


# ---- tables


def table(rows: Mapping[str, Row], known: Mapping[str, Told]) -> str:
    has_joules = any("joules" in told.get("speed", {}) for told in known.values())
    ratios = ("size", "latency", "throughput", *(["joules"] if has_joules else []))
    lines = [f"| technique | model | {' | '.join(ratios)} | quality | effort |"]
    lines.append(f"|---|---|{'--:|' * len(ratios)}---|--:|")
    for name, row in rows.items():
        told, fast = known.get(name, {}), known.get(name, {}).get("speed", {})
        spent = told.get("quality", {}).get("effort_s")
        cells = [f"{fast[each]:.2f}" if each in fast else UNKNOWN for each in ratios]
        cells = [row.technique, row.model, *cells, quality_text(row, told), f"{spent / 60:.1f} min" if spent else ""]
        lines.append(f"| {' | '.join(cells)} |")
    if missing := [name for name in rows if not PARTS[name] <= set(known.get(name, {}))]:
        lines += ["", f"Not measured in full: `python benchmarks/techniques.py --only {' '.join(missing)} --write`."]
    return "\n".join(lines)


def quality_text(row: Row, told: Told) -> str:
    if not row.tool:
        return f"{told['speed']['same']:.1%} of the tokens are the same" if "speed" in told else UNKNOWN
    if not (found := told.get("quality", {})):
        return UNKNOWN
    if "gained" in found:
        share = f", {found['trained']:.1%} of the weights trained" if found["trained"] else ""
        return f"{found['gained']:.2f} nats gained, {found['task_score']:.0%} of questions{share}"
    words = f"perplexity {found['perplexity_ratio']:.4f}, KL {found['kl']:.2g}, {found['flips']:.1%} flipped"
    return words + (f", {found['task_score'] / found['task_parent']:.0%} of the score" if "task_drop" in found else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--part", choices=("quality", "speed"), help="unset is both")
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("--threads", type=int, help="of speed; with 1, processor time")
    parser.add_argument("--work", type=Path, default=Path("runs/techniques"), help="what is known and made")
    parser.add_argument("--quick", action="store_true", help="the built-in model, few steps, one round")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        file = options.work / f"{name}.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        for part, measure in (("quality", quality), ("speed", speed)):
            if part in PARTS[name] and options.part in (None, part) and part not in told:
                told[part] = measure(name, options)
                (new := file.with_suffix(".new")).write_text(json.dumps(told, indent=2))
                new.replace(file)
                print(name, part, json.dumps(told[part]), flush=True)
    known = {name: json.loads(file.read_text()) for name in ROWS if (file := options.work / f"{name}.json").exists()}
    for section, rows in (("models", MODELS), ("serving", SERVING)):
        print(f"\n{table(rows, known)}")
        if options.write and not options.quick:
            write_section(PAGE, section, table(rows, known))


if __name__ == "__main__":
    main()
