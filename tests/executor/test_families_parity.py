"""Every family, served: the real scheduler and either executor against transformers on random float32 checkpoints.

The native executor serves every family, and the most unlike ones on every instruction set of this machine, on one
thread (test_native_identity has the same bits from any number); the torch executor serves those too, and
`test_torch_decoder` has the logits of its decoder for the others.

Prompts of unlike lengths share each step, a small token budget cuts them into chunks, two begin alike (a prefix hit),
and the pool is too small for all, so that some are preempted and computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from maitred.config import ModelConfig
from maitred.core.request import RequestState, SamplingParams
from maitred.executor.torch import TorchExecutor, plan_torch_executor
from maitred.kernels import _native
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.executor.native_worlds import load_native
from tests.executor.torch_worlds import assert_close
from tests.fakes import make_request, make_scheduler
from tests.model.checkpoints import FAMILIES, VOCAB_SIZE, load_reference, make_checkpoint

NUM_GREEDY = 40
NEAR_TIE = 1e-4
BLOCK_SIZE = 4
BUDGET = 24  # tokens in a step: prompts over it come in chunks
SHARED = 24  # tokens with which two prompts begin
LENGTHS = {"one": 1, "short": 7, "window": 23, "shares": 37, "long": 60}
NUM_STATE_SLOTS = 10  # of recurrent layers, which eight requests and two snapshots have
NUM_BLOCKS = 65  # all six at their longest need 102


@dataclass
class Served:
    """What came of serving: the requests, and every run of logits that the executor computed."""

    requests: list[RequestState] = field(default_factory=list)
    chunks: list[tuple[str, int, torch.Tensor]] = field(default_factory=list)

    def see(self, request_id: str, start: int, logits: Any) -> None:
        self.chunks.append((request_id, start, torch.as_tensor(logits).cpu().clone()))

    def num_chunks_in_prompt(self, request: RequestState) -> int:
        return len(
            {start for r, start, _ in self.chunks if r == request.request_id and start < request.num_prompt_tokens}
        )


def load_executor(folder: Path, *, device: str, max_model_len: int = 128) -> TorchExecutor:
    with open_checkpoint(str(folder)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        config = ModelConfig(device=device, dtype="float32", num_threads=1)
        plan = plan_torch_executor(config, checkpoint, spec, block_size=BLOCK_SIZE)
        return plan.build(num_blocks=NUM_BLOCKS, max_model_len=max_model_len, num_state_slots=NUM_STATE_SLOTS)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_request(request_id: str, prompt: list[int], arrived_at: float, block_size: int = BLOCK_SIZE) -> RequestState:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)
    return make_request(
        request_id,
        prompt=prompt,
        max_tokens=NUM_GREEDY,
        arrived_at=arrived_at,
        block_size=block_size,
        sampling=sampling,
    )


def serve(executor: Any, *, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS, **kept: Any) -> Served:
    """All prompts at once, and one more, with a prefix that is cached by then, after the others' prompts. `kept` says
    what the cache has beside blocks.
    """
    served = Served()
    executor.on_logits = served.see
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=BUDGET, **kept)
    shared = random_tokens(SHARED, seed=99)
    prompts = {name: random_tokens(length, seed=length) for name, length in LENGTHS.items()}
    prompts["shares"][:SHARED] = shared
    for i, (name, prompt) in enumerate(prompts.items()):
        served.requests.append(greedy_request(name, prompt, float(i), block_size))
    late = greedy_request("late", shared + random_tokens(16, seed=98), 50.0, block_size)
    for request in served.requests:
        scheduler.add(request, request.arrived_at)
    now = 0.0
    while scheduler.has_work or late not in served.requests:
        if late not in served.requests and all(r.num_output_tokens for r in served.requests):
            served.requests.append(late)
            scheduler.add(late, now)
        plan = scheduler.schedule(now)
        scheduler.update(plan, executor.execute(plan), now)
        now += 1.0
        assert now < 2000
    return served


def check_against_reference(served: Served, reference: Any) -> None:
    for request in served.requests:
        text = [*request.spec.prompt_token_ids, *request.output_token_ids]
        with torch.inference_mode():
            wanted_TV = reference(torch.tensor([text], device=reference.device)).logits[0].float().cpu()
        assert wanted_TV.std() > 0.05  # equal logits would prove nothing
        for request_id, start, logits in served.chunks:
            if request_id == request.request_id:
                assert_close(logits, wanted_TV[start : start + len(logits)])
        check_greedy(request, wanted_TV)


def check_greedy(request: RequestState, wanted_TV: torch.Tensor) -> None:
    """Equal up to the first near tie: from there on either text is right."""
    assert len(request.output_token_ids) == NUM_GREEDY
    for position, token in enumerate(request.output_token_ids, start=request.num_prompt_tokens):
        best, second = wanted_TV[position - 1].topk(2).values.tolist()
        if best - second < NEAR_TIE:
            return
        assert token == int(wanted_TV[position - 1].argmax()), f"{request.request_id} at position {position}"


UNLIKE = ("llama_bias", "gemma2", "gemma4_moe", "olmo2", "phi3_longrope", "granite", "qwen3", "deepseek_v3")
ISAS = _native.available_isas()
CASES = [("torch", family) for family in UNLIKE] + [(ISAS[-1], family) for family in FAMILIES]
CASES += [(ISAS[i % (len(ISAS) - 1)], family) for i, family in enumerate(UNLIKE) if len(ISAS) > 1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Each family's checkpoint, and transformers' model of it, are made once."""

    @cache
    def make(family: str, **changes: int) -> tuple[Path, Any]:
        folder = make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3, **changes)
        return folder, load_reference(folder)

    return make


@pytest.mark.parametrize(("executor", "family"), CASES)
def test_a_family_served_equals_transformers(executor: str, family: str, made):
    folder, reference = made(family)
    slots = NUM_STATE_SLOTS if "linear_num_key_heads" in FAMILIES[family][1] else 0
    if executor == "torch":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        served = serve(load_executor(folder, device=device), num_state_slots=slots)
    else:
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_state_slots": slots}
        native = load_native(folder, **sizes, isa=executor, num_threads=1)
        served = serve(native, num_state_slots=slots)
        native.close()
    check_against_reference(served, reference)
    by_id = {request.request_id: request for request in served.requests}
    assert served.num_chunks_in_prompt(by_id["long"]) >= 2
    assert by_id["late"].num_cached_tokens == (0 if slots else SHARED)  # no state was kept where prompts part
    assert sum(request.num_preemptions for request in served.requests) >= 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "num_kv_heads", "head_dim"), [(51, 3, 1, 6), (94, 2, 2, 130), (35, 5, 5, 2)]
)
def test_any_even_head_size_and_any_hidden_size(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, isa: str, made
):
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    folder, reference = made("llama", hidden_size=hidden_size, **sizes)
    served = serve(load_native(folder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, isa=isa))
    check_against_reference(served, reference)


@pytest.mark.parametrize(
    ("family", "block_size"), [("gemma2", 16), ("qwen3", 32), ("gemma2", 48), ("deepseek_v2_groups", 16)]
)
def test_whole_tiles_of_slots_give_the_same(family: str, block_size: int, made):
    """Blocks of 16 slots have a layout of their own in the pool."""
    folder, reference = made(family)
    executor = load_native(folder, num_blocks=40, block_size=block_size)
    check_against_reference(serve(executor, block_size=block_size, num_blocks=40), reference)
