"""Recurrent layers in the executors: a state goes on from chunk to chunk, to other slots, and past rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from maitred.config import ModelConfig
from maitred.core.errors import KernelError
from maitred.core.step import BlockCopy, ScheduledRow, SchedulerOutput, StateSave
from maitred.executor.state import DraftAsk
from maitred.executor.torch import plan_torch_executor
from maitred.kernels import _native
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.executor.native_worlds import load_native
from tests.executor.torch_worlds import GREEDY, Seen, assert_close
from tests.fakes import make_new
from tests.model.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint

BLOCK_SIZE, NUM_SLOTS = 4, 6
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
PROMPT = [Random(5).randrange(256) for _ in range(61)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(family: str) -> tuple[Path, torch.Tensor]:
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3)
        with torch.inference_mode():
            return folder, load_reference(folder)(torch.tensor([PROMPT])).logits[0]

    return make


def load(folder: Path, kind: str, **changes: Any) -> Any:
    if kind != "torch":
        return load_native(folder, num_blocks=64, num_state_slots=NUM_SLOTS, isa=kind, **changes)
    with open_checkpoint(str(folder)) as checkpoint:
        spec, config = spec_from_config(checkpoint.config), ModelConfig(device="cpu", dtype="float32", num_threads=1)
        plan = plan_torch_executor(config, checkpoint, spec, block_size=BLOCK_SIZE)
        return plan.build(num_blocks=64, max_model_len=128, num_state_slots=NUM_SLOTS)


class Pen:
    """Writes plans: request i has blocks 16 i .., or those of another, and slot i."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.seen = executor, Seen()
        executor.on_logits = self.seen
        self._told: dict[int, int] = {}

    def step(
        self,
        *rows: tuple[int, int, int],
        num_drafts: int = 0,
        blocks_of: int | None = None,
        copies: Sequence[tuple[int, int]] = (),
        saves: Sequence[tuple[int, int, int]] = (),
    ) -> dict[str, tuple[int, ...]]:
        """Compute tokens [start, end) of requests (number, start, end); return their tokens."""
        new = [row for row, _, _ in rows if row not in self._told]
        planned = []
        for row, start, end in rows:
            told = self._told.get(row, 0)
            self._told[row] = max(-(-(end + num_drafts) // BLOCK_SIZE), told)
            blocks = [16 * (blocks_of if blocks_of is not None else row) + i for i in range(told, self._told[row])]
            planned.append(
                ScheduledRow(
                    f"r{row}", start, end - start + num_drafts, end >= len(PROMPT), tuple(blocks), num_drafts=num_drafts
                )
            )
        output = self.executor.execute(
            SchedulerOutput(
                step=0,
                rows=tuple(planned),
                new_requests=tuple(
                    replace(make_new(f"r{row}", PROMPT, sampling=GREEDY), state_slot=row) for row in new
                ),
                state_copies=tuple(BlockCopy(*pair) for pair in copies),
                state_saves=tuple(StateSave(f"r{row}", *save) for row, *save in saves),
            )
        )
        if num_drafts:  # blocks of what was rejected are nobody's
            for (row, _, end), sampled in zip(rows, output.rows, strict=True):
                self._told[row] = -(-(end + sampled.num_accepted) // BLOCK_SIZE)
        return {row.request_id: row.token_ids for row in output.rows}

    def bits(self, row: int) -> list[bytes]:
        return [logits.numpy().tobytes() for logits in self.seen.of(f"r{row}")]


ISAS = _native.available_isas()
CASES = [("torch", FAMILIES[0])] + [(isa, FAMILIES[i % len(FAMILIES)]) for i, isa in enumerate(ISAS)]
CASES += [
    pytest.param(isa, family, marks=pytest.mark.soak)
    for isa in ISAS
    for family in FAMILIES
    if (isa, family) not in CASES
]


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_states_go_on_in_chunks_in_company_and_from_saved_slots(kind: str, family: str, made):
    folder, wanted = made(family)
    pen = Pen(load(folder, kind))
    pen.step((0, 0, 61))
    pen.step((1, 0, 7))
    pen.step((1, 7, 41), (2, 0, 1), saves=[(1, 8, 4), (1, 40, 5)])
    pen.step((1, 41, 42), (2, 1, 3), saves=[(1, 41, 4)])
    pen.step((1, 42, 61), (2, 3, 61))
    pen.step((3, 40, 61), blocks_of=1, copies=[(5, 3)])
    pen.step((4, 41, 61), blocks_of=1)
    for row, start in enumerate((0, 0, 0, 40, 41)):
        assert_close(pen.seen.of(f"r{row}"), wanted[start:])
        if kind != "torch":
            assert pen.bits(row) == pen.bits(0)[start:]
    pen.step((0, 61, 62))
    with pytest.raises(KernelError, match="goes on at position 61, and state slot 0 holds that of 62"):
        pen.step((0, 61, 62))
    pen.executor.close()


class Partly:
    """Drafts of which the first are right."""

    name = "partly"

    def __init__(self, text: Sequence[int]) -> None:
        self._text, self.num_right = text, 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        return [self._drafts(ask) for ask in asks]

    def _drafts(self, ask: DraftAsk) -> list[int]:
        done = ask.request.tokens.size - len(PROMPT)
        right = list(self._text[done : done + self.num_right])
        return right + [(self._text[done + i] + 1) % VOCAB_SIZE for i in range(len(right), ask.num_drafts)]

    def forget(self, request_id: str) -> None: ...

    def close(self) -> None: ...


def test_rejected_drafts_leave_no_trace_in_a_state(made):
    folder, _ = made(FAMILIES[0])
    pen = Pen(load(folder, _native.default_isa(), num_drafts=3, num_threads=2))
    text = [*pen.step((0, 0, 61))["r0"]]
    for position in range(61, 80):
        text += pen.step((0, position, position + 1))["r0"]
    pen.executor.proposer = drafts = Partly(text)
    found, chooser = [*pen.step((1, 0, 61))["r1"]], Random(1)
    while len(found) < 14:
        drafts.num_right = chooser.randint(0, 3)
        done = 60 + len(found)
        found += pen.step((1, done, done + 1), num_drafts=3)["r1"]
    assert found == text[: len(found)]
    assert pen.bits(1)[: 60 + len(found)] == pen.bits(0)[: 60 + len(found)]
