"""`maitred train-draft`: a head learns what serving asks of it, and the gate asks on data and general text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maitred.config.optimize import DraftConfig, ToolConfig
from maitred.model.checkpoint import BUILTIN_FOLDER, Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.head import open_head
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.optimize import data, draft
from maitred.optimize.data import Document
from maitred.optimize.draft import TOOL, Head, StepsAhead, drafting, head_config, head_loss, save_head, tapped
from maitred.optimize.evaluate import reply_begin
from maitred.optimize.job import JobReport, run_tool
from maitred.optimize.trainer import TokenBatch, batch_of
from tests.executor.head_reference import HeadReference, parameters_of
from tests.model.checkpoints import make_checkpoint

NUM_DRAFTS = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    with open_checkpoint(str(make_checkpoint("llama", tmp_path_factory.mktemp("models") / "served"))) as checkpoint:
        yield checkpoint


def model_of(served: Checkpoint) -> TorchDecoder:
    return load_torch_decoder(spec_from_config(served.config), served)


def head_of(model: TorchDecoder, drafted: Tensor | None = None) -> tuple[Head, dict[str, object]]:
    """Random, and large enough that norms and positions matter."""
    torch.manual_seed(0)
    drafted = torch.arange(model.spec.vocab_size) if drafted is None else drafted
    config = head_config(model.spec, len(drafted))
    head = Head(model, config, drafted)
    for weight in head.parameters():
        weight.data = 1 + 0.2 * torch.randn(weight.shape) if weight.ndim == 1 else 1.5 * torch.randn(weight.shape) / 8
    return head.bfloat16().float(), config


def batch_of_ids(ids: list[int]) -> TokenBatch:
    return TokenBatch(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool), (len(ids),))


@torch.no_grad()
def drafts_in_training(head: Head, model: TorchDecoder, taps_TE: Tensor, next_ids: list[int]) -> list[int]:
    """Drafts after the last row, each fed back: all rows go on with it, which no row sees of another."""
    batch, drafts, x_TD = batch_of_ids(next_ids), list[int](), head.fc(taps_TE)
    attend, ids = StepsAhead(head.spec, batch.lengths), batch.ids_T
    for step in range(NUM_DRAFTS):
        x_TD = head.ahead(model.embedding.weight[ids], x_TD, batch.positions_T + step, attend)
        drafts.append(int(head.drafted[head.logits(head.norm(x_TD[-1:])).argmax()]))
        ids = torch.full_like(ids, drafts[-1])
    return drafts


@pytest.mark.parametrize("drafted", [None, torch.arange(3, 300, 4)], ids=["all", "some"])
def test_a_head_is_trained_to_draft_what_the_reference_of_serving_drafts(
    tmp_path: Path, served: Checkpoint, drafted: Tensor | None
):
    model = model_of(served)
    if drafted is not None:
        drafted = drafted[drafted < model.spec.vocab_size]
    head, config = head_of(model, drafted)
    save_head(head, config, tmp_path)
    random = np.random.default_rng(0)
    with open_head(tmp_path, served) as opened:
        assert (opened.dtype, opened.borrowed) == ("bfloat16", {"embedding"})
        reference = HeadReference(opened.spec, parameters_of(opened), opened.draft_to_target)
        for length in (1, 5, 33):
            ids = random.integers(model.spec.vocab_size, size=length + 1).tolist()
            taps_TE, _ = tapped(model, batch_of_ids(ids[:-1]), opened.spec.taps)
            wanted, _ = reference.drafts(taps_TE.numpy(), ids[1:], NUM_DRAFTS)
            assert drafts_in_training(head, model, taps_TE, ids[1:]) == wanted


def test_documents_that_lie_one_behind_the_other_learn_as_each_alone(served: Checkpoint):
    model = model_of(served)
    head, _ = head_of(model)
    one, other = (Document(np.arange(*ids, dtype=np.int32), np.arange(*ids) > ids[0]) for ids in ((20, 29), (40, 49)))
    with torch.no_grad():
        alone = [head_loss(head, model, batch_of([each])) for each in (one, other)]
        torch.testing.assert_close(head_loss(head, model, batch_of([one, other])), sum(alone) / 2)
    longer = Document(np.arange(14, dtype=np.int32), np.arange(14) > 0)
    for step in range(4):
        count = int(drafting(batch_of([one, longer]), step)[1].sum())
        assert count == (7 - step) + (12 - step), "the first drafted token is the third of a document"


def test_a_prompt_is_read_and_not_learnt():
    batch = batch_of([Document(np.arange(10, 22, dtype=np.int32), np.arange(12) >= 8)])
    for step in range(4):
        weights, kept = drafting(batch, step)
        assert [row + step + 2 for row in kept.nonzero().flatten().tolist()] == [8, 9, 10, 11], (
            "tokens that are drafted"
        )
        assert weights.tolist() == [0.25] * 4


def test_drafts_are_judged_on_a_reply_of_a_documents_later_half():
    """Texts and own documents begin alike, so that their first tokens have one continuation."""
    ids = np.arange(12, dtype=np.int32)
    for learnt, begin in (((1, 12), 6), ((8, 12), 8), ((2, 5), 2), ((0, 1), 1)):
        assert reply_begin(Document(ids, (ids >= learnt[0]) & (ids < learnt[1]))) == begin


# ---- the command


def run(folder: Path, own: DraftConfig, **more: object) -> JobReport:
    lines = [json.dumps({"text": f"What do {n} soups and {m} teas cost?"}) for n in range(20) for m in range(11)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    fields = {"model": str(BUILTIN_FOLDER), "out": str(folder / "out"), "data": str(folder / "data.jsonl"), **more}
    return run_tool(TOOL, ToolConfig(**fields), own, lambda done, total, words: None)  # type: ignore[arg-type]


def test_a_head_learns_and_is_asked_on_data_and_on_general_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft, "BATCH_TOKENS", 256)
    for name, value in (("OWN_QUESTION", 4), ("OWN_REPLY", 8)):
        monkeypatch.setattr(data, name, value)
    report = run(tmp_path, DraftConfig(replay_share=0.5), steps=4)
    assert not report.passed
    assert [failure.rule for failure in report.failures] == ["min_acceptance"] * 2, "on either"
    told = json.loads((tmp_path / "out.rejected.json").read_text())
    assert set(told["figures"]) >= {"acceptance", "acceptance, general"}
    notes = told["train-draft"]
    assert (notes["steps"], notes["drafted_tokens"]) == (4, 1536)
    assert notes["replayed_documents"] > 10
    assert not (tmp_path / "out").exists()


def test_a_small_model_is_a_draft_too_and_appears_where_the_rules_let_it_through(tmp_path: Path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("min_acceptance: 0\n")
    asked = DraftConfig(kind="draft", student="layers=1,hidden=64", replay_share=0)
    report = run(tmp_path, asked, steps=1, gate=str(rules))
    assert report.passed
    assert report.fields["figures"].keys() >= {"acceptance"}
    assert not any(name.startswith("acceptance,") for name in report.fields["figures"]), "nothing was replayed"
    with open_checkpoint(str(tmp_path / "out")) as small:
        assert spec_from_config(small.config).num_layers == 1
