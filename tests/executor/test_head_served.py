"""The built-in model with its head: most of what that drafts stands, and faults of its own cost its drafts alone. And
models with an MTP layer in their checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file

from maitred.core.request import SamplingParams
from maitred.executor.drafter import head_proposer, plan_head
from maitred.kv.pages import groups_of
from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.head import mtp_layer, open_head
from maitred.text.tokenizer import Tokenizer
from tests.executor.native_worlds import native_plan
from tests.fakes import make_request, make_scheduler
from tests.model.gguf_models import stacked, write_gguf
from tests.model.heads import make_mtp_checkpoint

HEAD = BUILTIN_FOLDER.with_name(f"{BUILTIN_FOLDER.name}-mtp")
TOKENIZER = Tokenizer.from_folder(BUILTIN_FOLDER)
QUESTIONS = ("What is maitred?", "What is on the menu?", "How do I install it?")
NUM_BLOCKS = 128


class Served(NamedTuple):
    outputs: list[list[int]]
    num_drafts: int
    num_accepted: int


def prompt_of(question: str) -> list[int]:
    return TOKENIZER.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def served(
    num_drafts: Sequence[int],
    head: Path | None = HEAD,
    *,
    model: Path | None = None,
    temperature: float = 0.0,
    context: int = 256,
    rounds: int = 1,
    windows: Sequence[int | None] | None = None,
    paged: bool = True,
    **plan: object,
) -> Served:
    """Each question, after which drafts are asked for as often as `num_drafts` says, step by step and over again. A
    head of None is the model's MTP layer; a model of another vocabulary is asked in bytes. Layers with `windows` keep
    pages, unless blocks are to be whole."""
    ask = prompt_of if model is None else lambda question: list(question.encode())
    with ExitStack() as files:
        checkpoint = files.enter_context(open_checkpoint(str(model) if model is not None else None))
        opened: Any = files.enter_context(open_head(head, checkpoint)) if head is not None else mtp_layer(checkpoint)
        taps = opened.spec.taps if any(num_drafts) else ()
        spec, groups = spec_from_config(checkpoint.config), None
        if windows is not None:
            layers = [replace(layer, window=window) for layer, window in zip(spec.layers, windows, strict=True)]
            spec = replace(spec, layers=tuple(layers))
            groups = groups_of([*windows, *([None] if taps else [])], 256) if paged else None
        slots = 10 if spec.has_state else 0
        made = native_plan(checkpoint, spec, taps=taps, num_drafts=max(num_drafts), **{"dtype": "auto"} | plan)
        made = made.in_groups(groups) if groups is not None else made
        num_pages = NUM_BLOCKS * (groups.num_groups if groups is not None else 1)
        executor = made.build(num_blocks=num_pages, max_model_len=256, num_state_slots=slots)
        if taps:
            executor.proposer, _ = head_proposer(plan_head(made, opened, max_rows=8), executor, max_model_len=context)
    scheduler = make_scheduler(
        num_blocks=num_pages,
        groups=groups,
        num_state_slots=slots,
        num_drafts=lambda request, num_rows: num_drafts[len(request.output_token_ids) % len(num_drafts)],
    )
    outputs, drafted, accepted = [], 0, 0
    for _ in range(rounds):
        requests = [
            make_request(prompt=ask(question), max_tokens=24, seed=i, sampling=SamplingParams(temperature=temperature))
            for i, question in enumerate(QUESTIONS)
        ]
        for request in requests:
            scheduler.add(request, 0.0)
        while scheduler.has_work:
            step = scheduler.schedule(0.0)
            output = executor.execute(step)
            scheduler.update(step, output, 0.0)
            drafted += sum(row.num_drafts for row in output.rows)
            accepted += sum(row.num_accepted for row in output.rows)
        outputs += [list(request.output_token_ids) for request in requests]
    executor.close()
    return Served(outputs, drafted, accepted)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("dtype", ["auto", "float32", "int8"])
def test_most_drafts_stand_and_output_is_the_same(temperature: float, dtype: str):
    alone = served([0], temperature=temperature, dtype=dtype)
    drafted = served([4], temperature=temperature, dtype=dtype)
    assert drafted.outputs == alone.outputs
    assert drafted.num_accepted / drafted.num_drafts > 0.6


def test_a_head_that_was_not_asked_for_a_while_catches_up():
    """The taps of those steps waited."""
    drafted = served([0] * 9 + [3] * 3)
    assert drafted.outputs == served([0]).outputs
    assert drafted.num_accepted / drafted.num_drafts > 0.6


def test_prompts_that_are_found_in_the_cache_bring_the_heads_part_along():
    once, again = served([4]), served([4], rounds=2)
    assert again.outputs == once.outputs * 2
    share = again.num_accepted / again.num_drafts
    assert share > 0.9 * once.num_accepted / once.num_drafts


@pytest.mark.parametrize("windows", [(24, 24, None, 24, None), (24, None, None, None, None)])
def test_beside_layers_of_windows_the_heads_layer_keeps_all_tokens(windows: tuple[int | None, ...]):
    """Its pages are those of layers without a window, found in the cache and copied with them."""
    whole = served([4], windows=windows, rounds=2, paged=False)
    assert served([4], windows=windows, rounds=2) == whole
    assert whole.outputs == served([0], windows=windows, rounds=2).outputs
    assert whole.num_accepted > 0


@pytest.mark.parametrize("plan", [{"max_tokens": 16}, {"max_logits": 8}])
def test_small_steps_and_few_logits_change_nothing(plan: dict[str, int]):
    assert served([5], **plan).outputs == served([0]).outputs


def test_where_the_heads_context_ends_drafts_do():
    short = served([4], context=24)
    assert short.outputs == served([0]).outputs
    assert 0 < short.num_drafts < served([4]).num_drafts


def test_a_head_of_nan_drafts_nothing_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "ill"
    shutil.copytree(HEAD, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(weights[:8], "little")
    weights[begin:] = b"\xc0\x7f" * ((len(weights) - begin) // 2)  # NaN in bfloat16
    (folder / "model.safetensors").write_bytes(weights)
    assert served([4], folder) == Served(served([0]).outputs, 0, 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "the head's logits are NaN" in warnings[0]


def test_taps_after_the_last_layer_are_read_too(tmp_path: Path):
    """A head that was trained for others drafts nonsense; what counts is that output is the same."""
    folder = tmp_path / "last"
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}))
    drafted = served([3], folder)
    assert drafted.outputs == served([0]).outputs
    assert drafted.num_drafts > 0


MTP = {  # family -> its file's architecture, its checkpoint's layout
    "glm4_moe": ("glm4moe", "glm", {}),
    "deepseek_v3": (None, "glm", {}),  # latent attention
    "qwen3_5": ("qwen35", "qwen", {"num_hidden_layers": 4, "linear_num_value_heads": 6}),  # in another order in files
}


@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("family", MTP)
def test_a_models_own_mtp_layer_drafts_and_output_is_the_same(tmp_path: Path, family: str, predicts: bool):
    """Of a folder, and of a GGUF file of the same."""
    architecture, layout, sizes = MTP[family]
    models = [make_mtp_checkpoint(family, tmp_path / "folder", layout=layout, predicts=predicts, **sizes)]
    if architecture is not None:
        config = json.loads((models[0] / "config.json").read_text())
        tensors = stacked(load_file(models[0] / "model.safetensors"))
        models.append(write_gguf(tmp_path / "model.gguf", architecture, config, tensors))
    for temperature in (0.0, 0.7):
        how: Any = {"temperature": temperature, "dtype": "float32"}
        alone = served([0], None, model=models[0], **how)
        drafted, *of_file = (served([4, 0, 2], None, model=model, **how, rounds=2) for model in models)
        assert drafted.outputs == alone.outputs * 2
        assert drafted.num_drafts > 0
        assert of_file in ([], [drafted])
        if predicts:
            assert drafted.num_accepted == drafted.num_drafts
