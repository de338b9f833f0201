"""One layer at a time: hidden states of all documents are kept, and each layer is read, seen, changed and left.

So a model is calibrated in the memory of one layer and of the hidden states. After any end the walk goes on with the
layer that it was at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import Attend, Rotations, TorchDecoder, load_part, tensor_from_raw
from maitred.model.weight_map import weight_map
from maitred.storage.files import replace_file

LINEARS = ("qkv", "attention_output", "gate_up", "down")
"""A layer's stacked matrices, in the order in which a forward pass meets them."""
FLOAT32_BYTES = 2**29  # hidden states that take more are kept in bfloat16
BATCH_TOKENS = 2048
LIKE_LENGTH = 0.8
LONG = 512  # tokens of a document above which PyTorch's fused attention is the quicker one, and the smaller

OnInput = Callable[[str, Tensor], None]  # (name of a linear, its inputs [T, K] of some documents)


@dataclass(frozen=True, slots=True)
class CalibratedLayer:
    """A layer in memory, in float32, whose inputs can be seen and whose weights can be changed."""

    index: int
    module: nn.Module
    run: Callable[[], Iterator[Tensor]]
    """Runs all documents through the layer as it is now; its outputs, some documents at a time."""

    def observe(self, on_input: OnInput, linears: Sequence[str] = LINEARS) -> None:
        """Tell the inputs of these linears, over all documents."""

        def tell(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            return lambda _, inputs: on_input(name, inputs[0])

        hooks = [self.module.get_submodule(name).register_forward_pre_hook(tell(name)) for name in linears]
        try:
            for _ in self.run():
                pass
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def walk_layers(
    parent: Checkpoint,
    documents: Sequence[Sequence[int]],
    see: Callable[[CalibratedLayer], Mapping[str, Tensor]],
    *,
    state: Path,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Show each layer of `parent` to `see`, which may change its weights, and pass on the outputs of the changed layer.

    What `see` returns is kept: `layer_state(state, i)` has it from then on, and a walk of the same documents over the
    same folder goes on behind the last layer that was kept. Returns the last layer's outputs [T, D], before the norm.
    """
    spec = spec_from_config(parent.config)
    decoder, batches = TorchDecoder(spec, hollow=True), batches_of(documents)
    state.mkdir(parents=True, exist_ok=True)
    begun = state / "hidden.safetensors"
    hidden_TD: Tensor
    if begun.is_file():
        kept = load_file(begun)
        hidden_TD, first = kept["hidden_TD"], int(kept["next"])
    else:
        hidden_TD, first = embedded(parent, decoder, [token for ids in documents for token in ids]), 0
    for index in range(first, spec.num_layers):
        on_layer(index, spec.num_layers)
        layer = load_part(decoder, f"layers.{index}", parent)

        def run(layer: nn.Module = layer, hidden_TD: Tensor = hidden_TD) -> Iterator[Tensor]:
            begin = 0
            for lengths in batches:
                end = begin + sum(lengths)
                yield layer(hidden_TD[begin:end].float(), rotations_of(decoder, lengths), attend_of(spec, lengths))
                begin = end

        save_layer(state, index, see(CalibratedLayer(index, layer, run)))
        begin = 0
        for out in run():
            hidden_TD[begin : begin + len(out)] = out
            begin += len(out)
        layer.to("meta")
        save_whole({"hidden_TD": hidden_TD, "next": torch.tensor(index + 1)}, begun)
    parent.check_unchanged()
    return hidden_TD


def first_tokens(documents: Iterable[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The first documents, the last of them cut, of so many tokens in all."""
    found: list[list[int]] = []
    for ids in documents:
        if (left := num_tokens - sum(map(len, found))) < 2:
            break
        found.append(list(ids[:left]))
    return found


def layer_state(state: Path, index: int) -> dict[str, Tensor]:
    """What the walk kept of a layer."""
    return dict(load_file(state / f"layer-{index:04}.safetensors"))


def save_layer(state: Path, index: int, kept: Mapping[str, Tensor]) -> None:
    save_whole(kept, state / f"layer-{index:04}.safetensors")


def save_whole(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that is there whole, or as it was before."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    replace_file(path, lambda new: save_file(contiguous, new, metadata))


def embedded(parent: Checkpoint, decoder: TorchDecoder, token_ids: Sequence[int]) -> Tensor:
    """Hidden states [T, D] before the first layer; only the rows of these tokens are read."""
    (source,) = (s for s in weight_map(decoder.spec, parent.tensor_names()) if s.parameter == "embedding.weight")
    rows = tensor_from_raw(parent.tensor(source.tensor), source.tensor)[torch.tensor(token_ids)]
    is_large = 4 * rows.numel() > FLOAT32_BYTES
    return (rows.float() * decoder.embedding_scale).to(torch.bfloat16 if is_large else torch.float32)


def batches_of(documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Lengths of documents that run together, in order."""
    batches: list[list[int]] = []
    for ids in documents:
        if not batches or sum(batches[-1]) + len(ids) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(len(ids))
    return batches


def rotations_of(decoder: TorchDecoder, lengths: Sequence[int]) -> Rotations:
    return decoder.rotations(torch.cat([torch.arange(length) for length in lengths]))


def attend_of(spec: DecoderSpec, lengths: Sequence[int]) -> Attend:
    """Causal attention over whole documents that lie one behind the other, those of like length at once.

    Shorter ones are padded at their end, where nothing looks. PyTorch's fused attention takes five times as long on a
    CPU, one document at a time and backwards, until documents are long.
    """
    starts = np.cumsum([0, *lengths])
    chunks: list[tuple[list[int], int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not chunks or lengths[number] < LIKE_LENGTH * chunks[-1][1]:
            chunks.append(([], lengths[number]))
        chunks[-1][0].append(number)
    taken, back_T, done = [], np.empty(starts[-1], np.int64), 0
    for numbers, length in chunks:
        rows = [np.minimum(starts[n] + np.arange(length), starts[n + 1] - 1) for n in numbers]
        taken.append(torch.from_numpy(np.concatenate(rows)))
        for n in numbers:
            back_T[starts[n] : starts[n + 1]] = done + np.arange(lengths[n])
            done += length

    def attend(index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        found = []
        for rows_S, (numbers, length) in zip(taken, chunks, strict=True):
            parts = (x.index_select(0, rows_S).view(len(numbers), length, *x.shape[1:]) for x in (q_TNH, k_TKH, v_TKH))
            found.append(_attend(spec, spec.layers[index].window, *parts).flatten(0, 1))
        return torch.cat(found).index_select(0, torch.from_numpy(back_T))

    return attend


def _attend(spec: DecoderSpec, window: int | None, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> Tensor:
    (rows, length, num_heads, size), groups = q_BLNH.shape, spec.num_kv_heads
    cap, is_windowed = spec.attention_softcap, window is not None and window < length
    if length > LONG and cap is None and not is_windowed:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLKH, v_BLKH))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.attention_scale, enable_gqa=True)
        return out.transpose(1, 2)
    q = q_BLNH.view(rows, length, groups, -1, size).permute(0, 2, 3, 1, 4).reshape(rows * groups, -1, size)
    k = k_BLKH.permute(0, 2, 3, 1).reshape(rows * groups, size, length)
    scores = torch.bmm(q * spec.attention_scale, k)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    behind_LL = torch.arange(length)[:, None] - torch.arange(length)
    hidden_LL = (behind_LL < 0) | (behind_LL >= (window or length))
    bias_LL = torch.zeros(length, length, dtype=scores.dtype).masked_fill_(hidden_LL, float("-inf"))
    weights = (scores.view(-1, length, length) + bias_LL).softmax(-1, dtype=scores.dtype).view(scores.shape)
    out = torch.bmm(weights, v_BLKH.transpose(1, 2).reshape(rows * groups, length, size))
    return out.view(rows, num_heads, length, size).transpose(1, 2)
