"""Worlds for the torch executor's tests: random decoders, and `Hand`, which writes plans without a scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from maitred.core.request import SamplingParams
from maitred.core.step import BlockCopy, NewRequest, SampledRow, ScheduledRow, SchedulerOutput
from maitred.executor.torch import TorchExecutor
from maitred.model.spec import DecoderSpec, LayerSpec, RopeSpec, RopeType
from maitred.model.torch_decoder import Attend, TorchDecoder
from tests.fakes import make_new

GREEDY = SamplingParams(temperature=0.0, max_tokens=1000)
VOCAB = 97


def make_spec(*, windows: Sequence[int | None] = (None, None), **changes: Any) -> DecoderSpec:
    """Two layers of 4 heads of 8 over 2 key heads, unless told otherwise."""
    fields: dict[str, Any] = {
        "architecture": "Tiny",
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "norm_eps": 1e-6,
        "attention_scale": 8**-0.5,
    } | changes
    rope = RopeSpec(rope_type=RopeType.DEFAULT, theta=10000.0, dim=fields["head_dim"])
    return DecoderSpec(layers=tuple(LayerSpec(window=w, rope=rope) for w in windows), **fields)


def dense_attend(spec: DecoderSpec) -> Attend:
    """Causal attention over the T tokens of one whole sequence, the obvious way."""

    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sinks_N: Tensor | None = None, writes: bool = True
    ) -> Tensor:
        if writes:
            kept[layer] = k_TKH, v_TKH
        k_TKH, v_TKH = kept[layer]
        num_tokens, group = q_TNH.shape[0], spec.num_heads // k_TKH.shape[1]
        k_TNH, v_TNH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
        scores_NTS = torch.einsum("tnh,snh->nts", q_TNH.float(), k_TNH.float()) * spec.attention_scale
        if spec.attention_softcap is not None:
            scores_NTS = torch.tanh(scores_NTS / spec.attention_softcap) * spec.attention_softcap
        behind_TS = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
        hidden_TS = behind_TS < 0
        window = spec.layers[layer].window
        if window is not None:
            hidden_TS |= behind_TS >= window
        scores_NTS = scores_NTS.masked_fill(hidden_TS.to(scores_NTS.device), float("-inf"))
        if sinks_N is not None:
            scores_NTS = torch.cat((scores_NTS, sinks_N[:, None, None].expand(-1, num_tokens, 1)), dim=-1)
        weights_NTS = scores_NTS.softmax(-1)[..., :num_tokens]
        return torch.einsum("nts,snh->tnh", weights_NTS, v_TNH.float()).to(q_TNH.dtype)

    return attend


def make_decoder(spec: DecoderSpec, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Seeded weights large enough that attention is far from uniform."""
    decoder = TorchDecoder(spec, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.35)
    other = TorchDecoder(spec, device=device, dtype=dtype)
    other.load_state_dict(decoder.state_dict())
    return other


def make_executor(decoder: Any, *, num_blocks: int = 64, block_size: int = 4, **changes: Any) -> TorchExecutor:
    weight = decoder.embedding.weight
    fields: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "kv_dtype": weight.dtype} | changes
    return TorchExecutor(decoder, num_blocks=num_blocks, block_size=block_size, **fields)


def dense_logits(decoder: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence, computed at once and without a cache."""
    device = decoder.embedding.weight.device
    tokens = torch.tensor(list(token_ids), device=device)
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(len(token_ids), device=device), dense_attend(decoder.spec))
        logits: torch.Tensor = decoder.logits(hidden).cpu()
    return logits


def dense_greedy(decoder: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class Seen:
    """Collects the logits of every computed position; give it to an executor as `on_logits`."""

    def __init__(self) -> None:
        self.logits: dict[str, dict[int, torch.Tensor]] = {}

    def __call__(self, request_id: str, start: int, logits: Any) -> None:
        self.logits.setdefault(request_id, {}).update(enumerate(torch.as_tensor(logits).cpu(), start))

    def of(self, request_id: str) -> torch.Tensor:
        by_position = self.logits[request_id]
        return torch.stack([by_position[p] for p in sorted(by_position)])


class Hand:
    """Writes plans by hand: every request gets its own blocks, in an order that is not the identity."""

    def __init__(self, executor: Any, *, num_blocks: int = 64, block_size: int = 4) -> None:
        self.executor = executor
        self.block_size = block_size
        self.free = list(range(1, num_blocks, 2)) + list(range(0, num_blocks, 2))
        self.tables: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}  # tokens
        self.computed: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self._prompts: dict[str, Sequence[int]] = {}
        self._new: list[NewRequest] = []
        self._forgotten: list[str] = []
        self._copies: list[BlockCopy] = []
        self._replaced: dict[str, list[tuple[int, int]]] = {}
        self._handed_over: dict[str, int] = {}  # blocks of the table that the executor has been told of
        self._steps = itertools.count()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        shared_blocks: Sequence[int] = (),
        computed: int | None = None,
    ) -> None:
        """`shared_blocks` hold the first tokens already (a prefix hit): all of them, or `computed`."""
        self._prompts[request_id] = prompt
        self._new.append(make_new(request_id, prompt, output, sampling=sampling, seed=7))
        self.tables[request_id] = list(shared_blocks)
        self._handed_over[request_id] = 0
        self.computed[request_id] = len(shared_blocks) * self.block_size if computed is None else computed
        self.known[request_id] = len(prompt) + len(output)
        self.outputs[request_id] = list(output)

    def forget(self, request_id: str, *, free_blocks: bool = True) -> None:
        self._forgotten.append(request_id)
        if free_blocks:
            self.free = self.tables[request_id] + self.free
        for of_request in (self.tables, self.known, self.computed):
            del of_request[request_id]

    def preempt(self, request_id: str) -> None:
        """Forget it and learn it again, with its tokens and without its blocks."""
        self.forget(request_id)
        self.add(request_id, self._prompts[request_id], output=self.outputs[request_id])

    def replace_block(self, request_id: str, index: int) -> int:
        """Copy on write: from the next step on this request has its own copy of a shared block."""
        target = self.free.pop(0)
        self._copies.append(BlockCopy(self.tables[request_id][index], target))
        if index < self._handed_over[request_id]:
            self._replaced.setdefault(request_id, []).append((index, target))
        self.tables[request_id][index] = target
        return target

    def step(self, shares: Mapping[str, int] | None = None) -> dict[str, SampledRow]:
        """Compute `shares[request]` more tokens of each request named; None: all that is known of every request."""
        if shares is None:
            shares = {r: self.known[r] - self.computed[r] for r in self.tables}
        rows = tuple(self._row(request_id, share) for request_id, share in shares.items())
        plan = SchedulerOutput(
            step=next(self._steps),
            rows=rows,
            new_requests=tuple(self._new),
            forgotten_request_ids=tuple(self._forgotten),
            block_copies=tuple(self._copies),
        )
        self._new, self._forgotten, self._copies = [], [], []
        output = self.executor.execute(plan)
        for row in output.rows:
            self.outputs[row.request_id] += row.token_ids
            self.known[row.request_id] += len(row.token_ids)
        return {row.request_id: row for row in output.rows}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def _row(self, request_id: str, share: int) -> ScheduledRow:
        start, table = self.computed[request_id], self.tables[request_id]
        end = start + share
        assert share >= 1
        assert end <= self.known[request_id]
        while len(table) * self.block_size < end:
            table.append(self.free.pop(0))
        new = tuple(table[self._handed_over[request_id] :])
        self._handed_over[request_id] = len(table)
        self.computed[request_id] = end
        return ScheduledRow(
            request_id,
            start,
            share,
            samples=end == self.known[request_id],
            new_block_ids=new,
            replaced_blocks=tuple(self._replaced.pop(request_id, ())),
        )


def random_prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Every element within `tolerance`, absolute or relative."""
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).abs()
    wrong = ~((error <= tolerance) | (error <= tolerance * wanted.double().abs()))  # a NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off, by up to {error[wrong].max()}"
