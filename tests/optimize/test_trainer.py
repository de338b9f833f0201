"""The loop goes on exactly after any end, and its batches are whole documents that do not see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maitred.core.errors import ConfigError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import load_torch_decoder
from maitred.optimize.data import Document
from maitred.optimize.trainer import Budget, Trained, batch_of, batches_of, hard_loss, learnt_logits, soft_loss, train
from tests.executor.torch_worlds import dense_attend
from tests.model.checkpoints import make_checkpoint

torch.set_num_threads(1)


def document(length: int, seed: int, prompt: int = 1) -> Document:
    ids = np.random.default_rng(seed).integers(0, 272, length, dtype=np.int32)
    return Document(ids, np.arange(length) >= prompt)


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "gemma3"])
def test_documents_of_a_batch_see_themselves_alone(family: str, tmp_path: Path):
    """Softcap, windows and grouped heads included; one document is longer than all that is padded."""
    with open_checkpoint(str(make_checkpoint(family, tmp_path))) as checkpoint:
        decoder = load_torch_decoder(spec_from_config(checkpoint.config), checkpoint)
    documents = [document(length, length, prompt=length // 2) for length in (30, 7, 31, 26, 600, 2)]
    with torch.no_grad():
        together = learnt_logits(decoder, batch_of(documents))
        alone = []
        for each in documents:
            ids = torch.from_numpy(each.ids).long()
            hidden = decoder(ids, torch.arange(len(ids)), dense_attend(decoder.spec))
            alone.append(decoder.logits(hidden)[:-1][torch.from_numpy(each.learnt[1:])])
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)
    assert int(batch_of(documents).learnt_T.sum()) == len(together)


def test_every_epoch_has_every_document_once_in_an_order_of_its_own():
    documents = [document(10 + n, n) for n in range(9)]
    draw = batches_of(documents, seed=3, num_tokens=40)
    epochs, step = [], 0
    for _ in range(2):
        lengths: list[int] = []
        while len(lengths) < len(documents):
            lengths += draw(step, 0.0).lengths
            step += 1
        assert sorted(lengths) == [10 + n for n in range(9)]
        epochs.append(lengths)
    assert epochs[0] != epochs[1]
    assert draw(1, 0.5).ids_T.equal(batches_of(documents, seed=3, num_tokens=40)(1, 0.0).ids_T)


class Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def loss(self, batch: Tensor) -> Tensor:
        error: Tensor = self.out(torch.tanh(self.hidden(batch))) * self.frozen - batch.sum(-1, keepdim=True)
        return error.square().mean()


def drawn(step: int, share: float) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def run(module: Lines, state: Path, batches: Any = drawn, **budget: Any) -> Trained:
    wanted = Budget(**({"steps": 60, "lr_scale": 10.0} | budget))
    return train(module, module.loss, batches, wanted, state, lambda *_: None, num_tokens=len)


@pytest.mark.parametrize("use_muon", [True, False])
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(use_muon: bool, tmp_path: Path):
    def ended(step: int, share: float) -> Tensor:
        if step == 33:
            raise KeyboardInterrupt
        return drawn(step, share)

    whole, parts = Lines(), Lines()
    undisturbed = run(whole, tmp_path / "whole", use_muon=use_muon)
    with pytest.raises(KeyboardInterrupt):
        run(parts, tmp_path / "parts", ended, use_muon=use_muon, save_every_s=0.0)
    anew = Lines()
    found = run(anew, tmp_path / "parts", use_muon=use_muon)
    assert all(a.equal(b) for a, b in zip(whole.parameters(), anew.parameters(), strict=True))
    assert [p["loss"] for p in found.curve] == [p["loss"] for p in undisturbed.curve]
    assert len(found.curve) == 3
    assert found.curve[-1]["loss"] < 0.7 * found.curve[0]["loss"], "and it learns"
    assert run(anew, tmp_path / "parts", use_muon=use_muon).step == 60, "nothing is left to do"


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_what_was_good(tmp_path: Path):
    def damaged(step: int, share: float) -> Tensor:
        return drawn(step, share) * (float("nan") if step == 5 else 1.0)

    with pytest.raises(ConfigError, match=r"at step 5: loss nan.*lower the learning rate"):
        run(Lines(), tmp_path, damaged, save_every_s=0.0)
    assert run(Lines(), tmp_path, stop_after=5).step == 5


def test_minutes_are_a_budget_of_training_time(tmp_path: Path):
    found = run(Lines(), tmp_path, steps=None, minutes=0.002)
    assert found.elapsed_s >= 0.12
    assert found.curve[-1]["step"] == found.step > 0


def test_the_soft_loss_is_zero_at_the_teacher_alone():
    taught = torch.randn(5, 9)
    assert soft_loss(taught, taught, 2.0).abs() < 1e-6 < soft_loss(taught.roll(1), taught, 2.0)
    batch = batch_of([document(6, 1)])
    assert hard_loss(torch.zeros(5, 272), batch).item() == pytest.approx(np.log(272), rel=1e-5)
