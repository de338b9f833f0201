"""A draft model beside the served one: which it may be, what it takes, and what its drafts are worth."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.core.request import SamplingParams
from maitred.executor.drafter import draft_proposer, plan_draft
from maitred.executor.native_plan import NativePlan
from maitred.executor.state import DraftAsk, HeldRequest
from maitred.kernels import _native
from maitred.model.checkpoint import BUILTIN_FOLDER, folder_beside, open_checkpoint
from maitred.text.tokenizer import Tokenizer
from tests.executor.native_worlds import load_native
from tests.executor.torch_worlds import Hand
from tests.fakes import make_new, make_request, make_scheduler

BESIDE = BUILTIN_FOLDER.with_name(f"{BUILTIN_FOLDER.name}-draft")
VOCAB = 1536
NUM_BLOCKS = 128
TOKENIZER = Tokenizer.from_folder(BUILTIN_FOLDER)
QUESTIONS = ("What is maitred?", "What is on the menu?", "How do I install it?")


@contextlib.contextmanager
def planned(folder: Path = BESIDE, *, num_threads: int = 1, **model: object) -> Iterator[NativePlan]:
    """A plan, while its files are open."""
    config = ModelConfig(**{"weight_cache": "off", "num_threads": 1} | model)
    with open_checkpoint(None) as served, open_checkpoint(str(folder)) as draft:
        cache, scheduler = CacheConfig(block_size=4), SchedulerConfig()
        yield plan_draft(config, served, draft, cache=cache, scheduler=scheduler, num_threads=num_threads)


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message), planned(folder):
        pass


def copied_draft(folder: Path, **config: object) -> Path:
    shutil.copytree(BESIDE, folder, dirs_exist_ok=True)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    return folder


def test_the_built_in_models_draft_lies_beside_it(tmp_path: Path):
    with open_checkpoint(None) as served:
        assert folder_beside(served, "draft") == BESIDE
    with open_checkpoint(str(copied_draft(tmp_path / "alone"))) as served:
        assert folder_beside(served, "draft") is None


def test_a_draft_of_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path):
    refuse(
        copied_draft(tmp_path / "other", vocab_size=2048), "a vocabulary of 2,048 tokens and maitred-mini one of 1,536"
    )


def test_a_draft_whose_tokenizer_means_other_tokens_is_refused(tmp_path: Path):
    folder = copied_draft(tmp_path / "other")
    description = json.loads((folder / "tokenizer.json").read_text())
    vocab = description["model"]["vocab"]
    words = [word for word, token_id in vocab.items() if token_id >= 700]
    vocab |= {word: vocab[other] for word, other in zip(words, reversed(words), strict=True)}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    refuse(folder, "of its 1,536 token ids and the other's 1,536, [0-9]+ are other tokens")


def test_a_draft_without_a_tokenizer_is_taken_by_its_size(tmp_path: Path):
    folder = copied_draft(tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with planned(folder) as plan:
        assert plan.spec.vocab_size == VOCAB


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "int8", "int4"])
def test_a_draft_has_the_served_models_formats_and_no_more_threads_than_are_of_use_to_it(dtype: str):
    with planned(dtype=dtype, num_threads=1) as plan:
        assert plan.num_threads == 1
        assert dtype in ("auto", {"q4_1": "int4"}.get(plan.dtype_name, plan.dtype_name))
        assert 100_000 < plan.weights_bytes < 4_000_000
        model, summary = draft_proposer(plan, _native.ThreadPool(2), num_blocks=NUM_BLOCKS, max_model_len=64)
    assert summary.startswith("packed")
    model.close()


@pytest.mark.parametrize("num_blocks", [64, 14])  # with room for all, and with preemption
def test_served_with_its_draft_the_built_in_model_says_the_same_in_fewer_steps(num_blocks: int):
    alone, _, _ = served(num_blocks, 0)
    drafted, num_drafts, num_accepted = served(num_blocks, 4)
    assert drafted == alone
    assert num_accepted / num_drafts > 0.5


def test_a_draft_of_nan_drafts_nothing_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = copied_draft(tmp_path / "ill")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(weights[:8], "little")
    weights[begin:] = b"\xc0\x7f" * ((len(weights) - begin) // 2)  # NaN in bfloat16
    (folder / "model.safetensors").write_bytes(weights)
    alone, _, _ = served(64, 0)
    assert served(64, 4, folder) == (alone, 0, 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the draft model's logits are NaN" in warnings[0]


def served(num_blocks: int, num_drafts: int, draft: Path = BESIDE) -> tuple[list[list[int]], int, int]:
    """What requests say, how many drafts there were, and how many stood."""
    executor = load_native(BUILTIN_FOLDER, num_blocks=num_blocks, dtype="auto")
    with planned(draft) as plan:
        executor.proposer, _ = draft_proposer(plan, executor.threads, num_blocks=num_blocks, max_model_len=128)
    scheduler = make_scheduler(num_blocks=num_blocks, num_drafts=lambda request, num_rows: num_drafts)
    requests = [
        make_request(prompt=prompt_of(question), max_tokens=12, seed=i, sampling=SamplingParams(temperature=0.3 * i))
        for i, question in enumerate(QUESTIONS)
    ]
    for request in requests:
        scheduler.add(request, 0.0)
    made = accepted = 0
    while scheduler.has_work:
        plan_of_step = scheduler.schedule(0.0)
        output = executor.execute(plan_of_step)
        scheduler.update(plan_of_step, output, 0.0)
        made += sum(row.num_drafts for row in output.rows)
        accepted += sum(row.num_accepted for row in output.rows)
    executor.close()
    return [list(request.output_token_ids) for request in requests], made, accepted


def prompt_of(question: str) -> list[int]:
    return TOKENIZER.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)])
def test_most_drafts_of_the_built_in_model_stand(sampling: SamplingParams):
    """Its answers are drafted five tokens at a time; as many stand as the answer goes on with."""
    with planned() as plan:
        model, _ = draft_proposer(plan, _native.ThreadPool(1), num_blocks=NUM_BLOCKS, max_model_len=256)
    num_drafts = num_accepted = 0
    for question in QUESTIONS:
        prompt = prompt_of(question)
        hand = Hand(load_native(BUILTIN_FOLDER, num_blocks=NUM_BLOCKS, dtype="auto"), num_blocks=NUM_BLOCKS)
        hand.add("r", prompt, sampling)
        hand.run(24)
        request = HeldRequest(make_new(question, prompt, sampling=sampling, seed=7), VOCAB)
        request.blocks.extend(range(NUM_BLOCKS))
        left = hand.outputs["r"]
        while len(left) > 5:
            (drafts,) = model.propose([DraftAsk(request, 5)])
            stood = next((i for i, (a, b) in enumerate(zip(drafts, left, strict=False)) if a != b), len(drafts))
            request.tokens.extend(left[: stood + 1])
            left = left[stood + 1 :]
            num_drafts, num_accepted = num_drafts + min(stood + 1, 5), num_accepted + stood
    assert num_accepted / num_drafts > 0.5
