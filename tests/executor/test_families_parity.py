"""Every family, served: the real scheduler and the torch executor against transformers on random float32 checkpoints.

Prompts of unlike lengths share each step, a small token budget cuts them into chunks, two begin alike (a prefix hit),
and the pool is too small for all, so that some are preempted and computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from maitred.config import ModelConfig
from maitred.core.request import RequestState, SamplingParams
from maitred.executor.torch import TorchExecutor, plan_torch_executor
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from tests.executor.torch_worlds import assert_close
from tests.fakes import make_request, make_scheduler
from tests.model.checkpoints import FAMILIES, VOCAB_SIZE, load_reference, make_checkpoint

NUM_GREEDY = 64
NEAR_TIE = 1e-4
BLOCK_SIZE = 4
BUDGET = 24  # tokens in a step: prompts over it come in chunks
SHARED = 24  # tokens with which two prompts begin
LENGTHS = {"one": 1, "short": 7, "window": 23, "shares": 37, "long": 60}
NUM_BLOCKS = 90  # all six at their longest need 138


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
        return plan.build(num_blocks=NUM_BLOCKS, max_model_len=max_model_len)


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


def serve(executor: Any, *, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS) -> Served:
    """All prompts at once, and one more, with a prefix that is cached by then, after the others' prompts."""
    served = Served()
    executor.on_logits = served.see
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=BUDGET)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_served_equals_transformers(family: str, tmp_path: Path, device: torch.device):
    folder = make_checkpoint(family, tmp_path, seed=3)
    served = serve(load_executor(folder, device=device.type))
    check_against_reference(served, load_reference(folder).to(device))
    by_id = {request.request_id: request for request in served.requests}
    assert served.num_chunks_in_prompt(by_id["long"]) >= 2
    assert by_id["late"].num_cached_tokens == SHARED
    assert sum(request.num_preemptions for request in served.requests) >= 1


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "num_kv_heads", "head_dim"), [(51, 3, 1, 6), (94, 2, 2, 130), (35, 5, 5, 2)]
)
def test_any_even_head_size_and_any_hidden_size(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, tmp_path: Path, device: torch.device
):
    folder = make_checkpoint(
        "llama",
        tmp_path,
        seed=4,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
    )
    served = serve(load_executor(folder, device=device.type))
    check_against_reference(served, load_reference(folder).to(device))
