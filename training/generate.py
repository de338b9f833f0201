"""Greedy generation for many prompts at once: prompts padded on the left, one key/value cache for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Decoder, KVCache
from training.tokenizer import END, EOS, PAD

Constraint = Callable[[list[int]], Tensor]
"""From the tokens of an answer so far, which tokens may come next: bool [V]."""


@torch.inference_mode()
def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int = 200,
    batch_size: int = 50,
    constraints: Sequence[Constraint | None] = (),
) -> list[str]:
    """The greedy continuation of each rendered prompt, without its end mark. Prompts of like length share a batch.

    `constraints`, where given, has one for each prompt, or None for a free answer.
    """
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    by_length = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    answers = [""] * len(prompts)
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        bound = [constraints[i] for i in chosen] if constraints else []
        found = _generate_batch(model, tokenizer, [encoded[i] for i in chosen], max_tokens, bound)
        for index, ids in zip(chosen, found, strict=True):
            answers[index] = tokenizer.decode(ids, skip_special_tokens=False)
    return answers


def _generate_batch(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_tokens: int,
    constraints: Sequence[Constraint | None],
) -> list[list[int]]:
    stop = {tokenizer.token_to_id(END), tokenizer.token_to_id(EOS)}
    longest = max(map(len, prompts))
    padding_B = torch.tensor([longest - len(ids) for ids in prompts])
    pad = tokenizer.token_to_id(PAD)
    tokens_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
    caches = [KVCache() for _ in range(model.shape.num_layers)]
    outputs: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    for index in range(max_tokens):
        positions, mask = _where(padding_B, tokens_BT.shape[1], longest + index)
        hidden_BTD = model.hidden(tokens_BT, mask=mask, caches=caches, positions=positions)
        logits_BV = model.logits(hidden_BTD[:, -1])
        for row, constraint in enumerate(constraints):
            if constraint is not None and not finished[row]:
                logits_BV[row, ~constraint(outputs[row])] = float("-inf")
        next_B = logits_BV.argmax(-1)
        for row, token in enumerate(next_B.tolist()):
            finished[row] = finished[row] or token in stop
            if not finished[row]:
                outputs[row].append(token)
        if all(finished):
            break
        tokens_BT = next_B[:, None]
    return outputs


def _where(padding_B: Tensor, num_new: int, num_seen: int) -> tuple[Tensor, Tensor]:
    """Positions [B, 1, T] counted after the padding, and the mask [B, 1, T, S]; the last T of S tokens are new."""
    place_S = torch.arange(num_seen)
    place_T = place_S[num_seen - num_new :]
    positions_B1T = (place_T - padding_B[:, None]).clamp(min=0)[:, None]
    causal_TS = place_S <= place_T[:, None]
    real_B1S = (place_S >= padding_B[:, None])[:, None]
    # A padding token may look at itself: a row of nothing but minus infinity would be NaN.
    itself_TS = place_S == place_T[:, None]
    allowed_BTS = (causal_TS & real_B1S) | itself_TS
    return positions_B1T, torch.zeros(allowed_BTS.shape).masked_fill_(~allowed_BTS, float("-inf"))[:, None]
