"""Heads: drafts are those of the package `speculators`, on folders that it wrote; MTP layers: those of the layer in
transformers' model that has one more, between what DeepSeek-V3's report (arXiv:2412.19437) describes.

The package asks for an older transformers than the other tests, and for torchvision and datasets, so it is not among
what contributors install. Where it is there (`pip install --no-deps speculators==0.9.0`, and what it then misses), the
numpy reference and the native head are held against it; without, the native one against the reference, which in
tests/optimize/test_draft.py stands against what trains heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from maitred.core.request import SamplingParams
from maitred.executor.drafter import ChainEnd, DraftPiece, DraftRunner, plan_head
from maitred.kernels import _native
from maitred.kernels.sampler import Sampler
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.head import mtp_layer, open_head
from tests.executor.head_reference import HeadReference, parameters_of
from tests.executor.native_worlds import native_plan
from tests.executor.torch_worlds import Hand, random_prompt
from tests.model.checkpoints import VOCAB_SIZE, load_reference, make_checkpoint, make_model
from tests.model.heads import MTP_NAMES, TAPS, make_head, make_mtp_checkpoint, vocabulary

NUM_DRAFTS = 6
BLOCK_SIZE = 4
GREEDY: Any = SimpleNamespace(sampling=SamplingParams(temperature=0.0), seed=0, sample_index=0)
DRAFT_IDS = np.arange(VOCAB_SIZE)[3::4]

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "of fewer tokens": {"draft_ids": DRAFT_IDS},
    "normed before": {"norm_before_fc": True, "norm_before_residual": True},
    "normed each, and after": {"fc_norm": True, "norm_output": True, "draft_ids": DRAFT_IDS},
    "qwen3": {"family": "qwen3", "norm_before_residual": True},
    "with biases": {"layer": {"attention_bias": True, "mlp_bias": True}},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "served")


def write_head(folder: Path, *, family: str = "llama", draft_ids: Any = None, layer: Any = None, **flags: Any) -> Any:
    """A random head of the served model, the package's own, which also saves it."""
    speculators = pytest.importorskip("speculators", reason="the package speculators 0.9 is not installed")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import AutoConfig

    described = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 72,
            "intermediate_size": 44,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 18,
            "rms_norm_eps": 1e-5,
            "pad_token_id": None,
            **(layer or {}),
        },
    )
    described._attn_implementation = "sdpa"
    greedy = speculators.proposals.greedy.GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=described,
        draft_vocab_size=VOCAB_SIZE if draft_ids is None else len(draft_ids),
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[greedy],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    head = Eagle3DraftModel(config)
    if draft_ids is not None:
        head.load_vocab_mappings(
            **{name: torch.from_numpy(ids) for name, ids in vocabulary(draft_ids, VOCAB_SIZE).items()}
        )
    _randomise(head)
    head.save_pretrained(folder)
    return head.eval()


def _randomise(head: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 2:
                weight.copy_(noise * (0.2 if "embed" in name else 1.5 * weight.shape[1] ** -0.5))
            else:
                weight.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise)


def drafts_of_package(head: Any, taps_TE: np.ndarray, next_tokens_T: list[int]) -> list[int]:
    """Greedy drafts after the last row, each fed back as in serving.

    The package trains with the right tokens and never feeds a draft back. But at its step k, row t reads the token k
    places after its own; so the drafts go there, on rows that row t does not see.
    """
    num_rows, drafts = len(taps_TE), list[int]()
    hidden = torch.zeros(1, num_rows + NUM_DRAFTS, taps_TE.shape[1])
    hidden[0, :num_rows] = torch.from_numpy(taps_TE)
    token_ids = torch.zeros(1, num_rows + NUM_DRAFTS, dtype=torch.long)
    token_ids[0, :num_rows] = torch.tensor(next_tokens_T)
    for step in range(NUM_DRAFTS):
        with torch.no_grad():
            made = head(hidden, token_ids, torch.zeros_like(token_ids), ttt_steps=step + 1)
        drafted = int(made[step][0, num_rows - 1])
        drafts.append(drafted + (int(head.d2t[drafted]) if head.d2t is not None else 0))
        token_ids[0, num_rows + step] = drafts[-1]
    return drafts


def states(num_rows: int, seed: int, width: int = len(TAPS) * 72) -> tuple[np.ndarray, list[int]]:
    """Taps of so many positions, and the tokens after them."""
    random = np.random.default_rng(seed)
    taps_TE = random.standard_normal((num_rows, width), dtype=np.float32)
    return taps_TE, random.integers(VOCAB_SIZE, size=num_rows).tolist()


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_the_reference_drafts_as_the_package_does(tmp_path: Path, served: Path, settings: dict[str, Any]):
    package = write_head(tmp_path, **settings)
    with open_checkpoint(str(served)) as model, open_head(tmp_path, model) as head:
        reference = HeadReference(head.spec, parameters_of(head), head.draft_to_target)
        for seed, num_rows in enumerate((1, 2, 7, 40)):
            taps_TE, next_tokens_T = states(num_rows, seed)
            drafts, _ = reference.drafts(taps_TE, next_tokens_T, NUM_DRAFTS)
            assert drafts == drafts_of_package(package, taps_TE, next_tokens_T)


@contextmanager
def native_head(folder: Path | None, model: Path, isa: str | None = None) -> Iterator[tuple[DraftRunner, Any]]:
    """In float32, on one thread, beside its model; None is the model's MTP layer."""
    with open_checkpoint(str(model)) as served:
        head: Any = mtp_layer(served) if folder is None else open_head(folder, served)
        plan = native_plan(served, spec_from_config(served.config), taps=head.spec.taps, isa=isa)
        executor = plan.build(num_blocks=64, max_model_len=128, num_state_slots=1)
        program, _ = plan_head(plan, head, max_rows=4).load(executor, max_model_len=128)
        sampler = Sampler(executor.threads, isa=plan.isa)
        runner = DraftRunner(program, sampler, max_positions=128, vocabulary=head.draft_to_target)
        yield runner, head
        runner.close()
        executor.close()
        if folder is not None:
            head.close()


def drafts_of_native(
    runner: DraftRunner, requests: list[tuple[np.ndarray, list[int]]], num_made_before: int = 0
) -> list[list[int]]:
    """Of several requests in one chain; the first rows of each may have been made before."""
    blocks, pieces, first_block = [], [], 0
    for taps_TE, next_tokens_T in requests:
        num_blocks = -(-(len(taps_TE) + NUM_DRAFTS) // BLOCK_SIZE)
        blocks.append(np.arange(first_block, first_block + num_blocks, dtype=np.int32))
        first_block += num_blocks
        before = min(num_made_before, len(taps_TE) - 1)
        tokens = np.array(next_tokens_T, dtype=np.int32)
        if before:
            runner.compute([DraftPiece(tokens[:before], 0, blocks[-1], taps_TE[:before])])
        pieces.append(DraftPiece(tokens[before:], before, blocks[-1], taps_TE[before:]))
    return [made.tokens for made in runner.chain(pieces, [ChainEnd(NUM_DRAFTS, GREEDY)] * len(requests))]


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_the_native_head_drafts_as_the_reference(tmp_path: Path, served: Path, settings: dict[str, Any], isa: str):
    requests = [states(num_rows, seed) for seed, num_rows in enumerate((1, 2, 7, 40))]
    with native_head(make_head(tmp_path, served, **settings), served, isa) as (runner, head):
        reference = HeadReference(head.spec, parameters_of(head), head.draft_to_target)
        wanted = [reference.drafts(*request, NUM_DRAFTS)[0] for request in requests]
        assert drafts_of_native(runner, requests) == wanted
        assert drafts_of_native(runner, requests, num_made_before=5) == wanted


def test_a_head_of_specforge_drafts_as_the_same_of_speculators(tmp_path: Path, served: Path):
    request, found = states(9, seed=3), []
    for layout in ("speculators", "specforge"):
        folder = make_head(tmp_path / layout, served, layout=layout, draft_ids=DRAFT_IDS, own_embedding=True)
        with native_head(folder, served) as (runner, _):
            found += drafts_of_native(runner, [request])
    assert found[0] == found[1]
    assert set(found[0]) <= set(DRAFT_IDS.tolist())


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_the_native_head_drafts_as_the_package_does(tmp_path: Path, served: Path, settings: dict[str, Any]):
    package = write_head(tmp_path, **settings)
    requests = [states(num_rows, seed) for seed, num_rows in enumerate((1, 2, 7, 40))]
    with native_head(tmp_path, served) as (runner, _):
        assert drafts_of_native(runner, requests) == [drafts_of_package(package, *request) for request in requests]


def drafts_of_mtp_layer(
    reference: Any, folder: Path, layout: str, taps_TD: np.ndarray, next_tokens_T: list[int]
) -> list[int]:
    """Greedy drafts after the last row: the model's last layer over [token, state], and its own state from there on."""
    tensors = {name: torch.from_numpy(each) for name, each in load_file(folder / "model.safetensors").items()}
    last = len(reference.model.layers) - 1
    at = f"model.layers.{last}." if layout == "glm" else "mtp."
    joins, *norms = (tensors[f"{at}{name}.weight"] for name in MTP_NAMES[layout])
    norms = [weight_D + (layout == "qwen") for weight_D in norms]
    model, eps = reference.model, reference.config.rms_norm_eps

    def norm(x_TD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x_TD, (72,), weight_D, eps)

    tokens, drafts = list(next_tokens_T), list[int]()
    with torch.no_grad():
        states_TD = model.norm(torch.from_numpy(taps_TD))
        for _ in range(NUM_DRAFTS):
            embedded_TD = norm(model.embed_tokens(torch.tensor(tokens)), norms[0])
            both = torch.cat([embedded_TD, norm(states_TD, norms[1])], dim=-1)
            x = (both @ joins.T)[None]
            rope = model.rotary_emb(x, torch.arange(len(tokens))[None])
            out = norm(model.layers[last](x, position_embeddings=rope)[0, -1:], norms[2])
            drafts.append(int((out @ reference.lm_head.weight.T).argmax()))
            states_TD, tokens = torch.cat([states_TD, out]), [*tokens, drafts[-1]]
    return drafts


@pytest.mark.parametrize(
    ("family", "layout", "sizes"),
    [
        ("glm4_moe", "glm", {}),
        ("deepseek_v3", "glm", {}),
        ("qwen3_next", "qwen", {}),
        ("qwen3_5", "qwen", {"num_hidden_layers": 4}),
    ],
)
def test_an_mtp_layer_drafts_as_its_layer_in_transformers_does(
    tmp_path: Path, family: str, layout: str, sizes: dict[str, int]
):
    folder, reference = make_mtp_checkpoint(family, tmp_path, layout=layout, **sizes), make_model(family, **sizes)
    requests = [states(num_rows, seed, width=72) for seed, num_rows in enumerate((1, 2, 7, 40))]
    wanted = [drafts_of_mtp_layer(reference, folder, layout, *request) for request in requests]
    with native_head(None, folder) as (runner, _):
        assert drafts_of_native(runner, requests) == wanted
        assert drafts_of_native(runner, requests, num_made_before=5) == wanted


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "granite", "phi3"])
def test_taps_are_what_transformers_has_between_its_layers(tmp_path: Path, family: str):
    folder, prompt = make_checkpoint(family, tmp_path), random_prompt(23, seed=1)
    reference = load_reference(folder)
    taps = (0, 2, len(reference.model.layers))
    with open_checkpoint(str(folder)) as served:
        executor = native_plan(served, spec_from_config(served.config), taps=taps).build(
            num_blocks=64, max_model_len=128
        )
    hand = Hand(executor)
    hand.add("a", prompt)
    hand.step()
    last: list[torch.Tensor] = []  # transformers norms it before it tells
    reference.model.layers[-1].register_forward_hook(lambda layer, args, out: last.append(out))
    with torch.no_grad():
        told = reference.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    wanted = torch.cat([told[taps[0]], told[taps[1]], *last], dim=-1)[0]
    got = torch.from_numpy(executor.runner.taps[: len(prompt)].copy())
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-4)
    executor.close()
