"""Figures of a model beside its parent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp
from pathlib import Path

import numpy as np
import pytest

from maitred import LLM, SamplingParams
from maitred.cli.main import main
from maitred.cli.optimize import report_text
from maitred.core.errors import ConfigError
from maitred.model.checkpoint import BUILTIN_FOLDER, Checkpoint, open_checkpoint
from maitred.optimize.data import Document, Task
from maitred.optimize.evaluate import Interval, evaluate, intervals, logits
from tests.conftest import copied_model

MINI = str(BUILTIN_FOLDER)
EXACT = {"dtype": "float32", "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def mini() -> Iterator[Checkpoint]:
    with open_checkpoint(MINI) as checkpoint:
        yield checkpoint


def documents(count: int = 4, length: int = 40) -> list[Document]:
    """Ids at random, the second half judged: nothing that a model is sure of."""
    ids = np.random.default_rng(0).integers(5, 1500, (count, length), dtype=np.int32)
    return [Document(row, np.arange(length) >= length // 2) for row in ids]


def test_a_model_against_itself_is_equal_and_its_perplexity_is_that_of_prompt_logprobs(mini: Checkpoint):
    found = evaluate(MINI, against=mini, documents=documents(), served=EXACT)
    assert found.figures["kl"].value == found.figures["flips"].value == 0.0
    assert found.figures["perplexity_ratio"] == Interval(1.0, 1.0, 1.0, 4)
    with LLM(MINI, **EXACT) as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        answers = llm.generate([each.ids.tolist() for each in documents()], asked)
    told = [
        next(iter(known.values())).logprob
        for answer, document in zip(answers, documents(), strict=True)
        for known, is_judged in zip(answer.prompt_logprobs or [], document.learnt, strict=True)
        if is_judged and known is not None
    ]
    assert found.num_positions == len(told) == 80
    assert found.figures["perplexity"].value == pytest.approx(exp(-sum(told) / len(told)), rel=1e-5)


def test_kl_and_flips_are_of_the_whole_vocabulary_at_the_judged_positions(mini: Checkpoint):
    served = {"dtype": "int8"}
    found = evaluate(MINI, against=mini, documents=documents(), served=served)

    def probabilities(**options: str) -> np.ndarray:
        with LLM(MINI, enable_prefix_caching=False, **options) as llm:
            rows = [list(logits(llm, each.ids.tolist()))[19:-1] for each in documents()]
        values = np.exp(np.concatenate(rows).astype(np.float64))
        return values / values.sum(axis=1, keepdims=True)

    p, q = probabilities(**EXACT), probabilities(**served)
    assert found.figures["kl"].value == pytest.approx(float((p * np.log(p / q)).sum(axis=1).mean()), rel=1e-3)
    assert found.figures["flips"].value == pytest.approx(float((p.argmax(1) != q.argmax(1)).mean()))
    assert found.figures["kl"].low < found.figures["kl"].value < found.figures["kl"].high


def test_intervals_are_paired_and_narrow_with_documents():
    score = np.random.default_rng(1).random(400)
    table = np.stack([np.ones(400), score, score - 0.25], axis=1)
    figures = {"mean": lambda sums: sums[..., 1] / sums[..., 0], "drop": lambda s: (s[..., 1] - s[..., 2]) / s[..., 0]}
    few, many = intervals(table[:25], figures, seed=0), intervals(table, figures, seed=0)
    assert many["drop"].low == pytest.approx(0.25) == many["drop"].high  # the same documents on both sides
    assert many["mean"].high - many["mean"].low < 0.4 * (few["mean"].high - few["mean"].low)
    assert many["mean"].high - many["mean"].low == pytest.approx(2 * 1.96 * score.std() / 20, rel=0.1)
    assert intervals(table, figures, seed=0) == many


def asked(text: str, answer: str, **more: object) -> Task:
    return Task(messages=[{"role": "user", "content": text}], answer=answer, **more)  # type: ignore[arg-type]


def test_tasks_are_scored_by_category_and_against_the_parent(mini: Checkpoint):
    card = {"category": "card"}
    tasks = [
        asked("Do you have sushi?", "we do not serve sushi", match="contains", **card),
        asked("What is 47 plus 38?", r"\b85\b", match="regex", **card),
        asked("What is 47 plus 38?", "86", match="contains", category="sums"),
        asked("What is 47 plus 38?", "85.", match="choice", choices=("12.", "85.", "no"), category="sums"),
        asked("What is 47 plus 38?", "no", match="choice", choices=("12.", "85.", "no"), category="sums"),
    ]
    found = evaluate(MINI, against=mini, documents=documents(1), tasks=tasks, served=EXACT)
    with LLM(MINI) as llm:
        answer = llm.chat(list(tasks[0].messages), SamplingParams(temperature=0.0, max_tokens=64))[0].outputs[0].text
    assert found.tasks["card"]["score"].value == (1.0 if tasks[0].is_right(answer) else 0.5)
    assert found.tasks["sums"]["score"].value == pytest.approx(1 / 3)
    assert found.tasks["sums"]["drop"] == Interval(0.0, 0.0, 0.0, 3)
    assert found.figures["task_score"].drawn == 5


def test_a_cascade_asks_the_larger_model_where_the_smaller_has_an_unlikely_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sums = [(n, m) for n in range(41, 49) for m in (17, 38)]
    lines = [
        {"messages": [{"role": "user", "content": f"What is {n} plus {m}?"}], "answer": f"{n + m}"} for n, m in sums
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({**line, "match": "contains"}) for line in lines))
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "What is maitred?"}))
    files = ["--held-out", str(tmp_path / "held.jsonl"), "--tasks", str(tmp_path / "tasks.jsonl")]
    small = str(BUILTIN_FOLDER.with_name("maitred-mini-draft"))
    assert main(["evaluate", small, "--escalate-to", MINI, *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    steps = {float(at): {name: each["value"] for name, each in step.items()} for at, step in told["cascade"].items()}
    shares = [step["escalated"] for step in steps.values()]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1], steps[1.0]["drop"]) == (0.0, 1.0, 0.0)
    assert steps[0.9]["score"] > steps[0.0]["score"] == told["figures"]["task_score"]["value"]
    assert told["cascade"][f"{told['escalate_below']:g}"]["drop"]["high"] <= 0.02
    assert ", the least that passes" in report_text(told)


def test_a_head_is_measured_by_the_drafts_that_the_engine_accepts():
    prompts = [f"What do {n} soups and 3 teas cost?" for n in range(2, 6)]
    with LLM(MINI) as llm:
        template, encode = llm.model.chat_template, llm.get_tokenizer().encode
        assert template is not None
        rows = [encode(template.render([{"role": "user", "content": p}]), add_special_tokens=False) for p in prompts]
    asks = [Document(np.array([*row, 0], np.int32), np.arange(len(row) + 1) == len(row)) for row in rows]
    head = evaluate(MINI, documents=asks, draft=f"{MINI}-mtp").figures["acceptance"]
    noise = evaluate(MINI, documents=documents(), draft=f"{MINI}-mtp").figures["acceptance"]
    assert 0.3 < head.value <= 1.0
    assert head.drawn == 4
    assert noise.value < head.value


def test_models_of_unlike_vocabularies_are_refused(mini: Checkpoint, tmp_path: Path):
    folder = copied_model(tmp_path / "other", vocab_size=1600)
    with pytest.raises(ConfigError, match="has 1600 tokens, its parent 1536"):
        evaluate(str(folder), against=mini, documents=documents(1))


def test_the_command_measures_judges_and_leaves_with_3_where_a_rule_is_broken(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("maitred.optimize.evaluate.TIMED_TOKENS", 5)
    held_out, rules = tmp_path / "held.jsonl", tmp_path / "rules.yaml"
    lines = [json.dumps({"token_ids": each.ids.tolist()}) for each in documents(24)]
    held_out.write_text("\n".join(lines))
    rules.write_text("max_kl: 0.0001\nmin_gain: 0.01\n")
    words = ["evaluate", MINI, "--against", MINI, "--held-out", str(held_out), "--gate", str(rules), "--gain", "--json"]
    code = main([*words, "--dtype", "int8"])
    told = json.loads(capsys.readouterr().out)
    assert code == 3
    assert [each["rule"] for each in told["gate"]["failures"]] == ["max_kl"]
    assert not told["passed"]
    assert told["figures"]["gain"]["value"] > 0.01
    assert told["figures"]["kl"]["drawn"] == 24
