"""Texts for encoders: which are served, their tokenizers, and a text's way to its vector."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from maitred.api.generate.dialect import Prompt
from maitred.api.http.errors import shortened
from maitred.api.tensor.lease import TensorLease, new_id
from maitred.core.errors import InvalidRequest, ModelNotFound, PromptTooLong, TooManyTokens
from maitred.core.tensor_request import InferRequest, InferResponse
from maitred.engine.tensors import TensorModels
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.encoder import check_dimensions, inputs_for, vector_of
from maitred.tensor.encoder_config import Encoder, encoder_of, is_encoder
from maitred.text.tokenizer import Tokenizer


def encoders_of(tensors: TensorModels) -> dict[str, Encoder]:
    """Encoders that answer now, by name."""
    names = dict.fromkeys(entry.name for entry in tensors.index(ready_only=True))
    configs = {name: tensors.config(name) for name in names}
    return {name: encoder_of(config) for name, config in configs.items() if is_encoder(config)}


def encoder_named(tensors: TensorModels, name: str | None) -> str | None:
    """`name`, or the only one there is; None where no encoder is served at all. Raises ModelNotFound for another
    name, InvalidRequest where none of several is named.
    """
    if name is not None and tensors.versions(name) and is_encoder(tensors.config(name)):
        return name
    found = list(encoders_of(tensors))
    if found and name is not None:
        told = f"{shortened(repr(name))} is no encoder of texts that is served here; choose one of {', '.join(found)}"
        raise ModelNotFound(told, param="model")
    if len(found) > 1:
        raise InvalidRequest(f"name the model: one of {', '.join(found)}", param="model")
    return found[0] if found else None


class Tokenizers:
    """Tokenizers of encoders, by name. A file that changes is read again when models change, not before."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ANY_MESSAGE, Tokenizer]] = {}  # with the config of the load that it is of

    def has(self, name: str, config: ANY_MESSAGE) -> bool:
        """Whether `of` answers at once."""
        return name in self._read and self._read[name][0] is config

    def of(self, name: str, config: ANY_MESSAGE) -> Tokenizer:
        """An encoder's tokenizer. From any thread. Raises CheckpointError for a file gone or broken since the load."""
        if not self.has(name, config):
            encoder = encoder_of(config)
            tokenizer = Tokenizer.from_folder(encoder.tokenizer)
            if encoder.vocab_size is not None:
                tokenizer.limit_to(encoder.vocab_size)
            self._read[name] = (config, tokenizer)
        return self._read[name][1]


def tokens_of(
    tokenizer: Tokenizer, encoder: Encoder, texts: Sequence[Prompt], *, add_special_tokens: bool
) -> list[Sequence[int]]:
    """Tokens of each text; lists of token ids are taken as they are. Nothing is cut.

    Raises PromptTooLong with both numbers, InvalidRequest for none and for those that the vocabulary does not have.
    """
    found = []
    for position, text in enumerate(texts):
        where = "input" if len(texts) == 1 else f"input[{position}]"
        found.append(_tokens(tokenizer, encoder.max_length, text, where, add_special_tokens))
    return found


def _tokens(tokenizer: Tokenizer, most: int, text: Prompt, where: str, add_special_tokens: bool) -> Sequence[int]:
    if isinstance(text, str):
        least = tokenizer.min_tokens(text)
        if least > most:
            raise _too_long(where, f"at least {least}", most)
        try:
            ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most)
        except TooManyTokens as error:
            raise _too_long(where, str(error.num_tokens), most) from None
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param=where) from None
    else:
        ids = text
    if not ids:
        raise InvalidRequest(f"{where} has no tokens; send a text", param=where)
    if len(ids) > most:
        raise _too_long(where, str(len(ids)), most)
    wrong = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if wrong is not None:
        known = f"the vocabulary has ids 0 to {tokenizer.vocab_size - 1}"
        raise InvalidRequest(f"{where} has token {wrong}; {known}", param=where)
    return ids


def _too_long(where: str, num_tokens: str, most: int) -> PromptTooLong:
    told = f"{where} has {num_tokens} tokens, and the model takes {most}; texts are never cut: send shorter ones"
    return PromptTooLong(told, param=where)


async def vectors_of(
    lease: TensorLease,
    model: str,
    encoder: Encoder,
    token_lists: Sequence[Sequence[int]],
    num_dimensions: int | None = None,
) -> list[np.ndarray]:
    """Vectors of each text, float32. Each text is a request of its own, so that several clients' texts share batches;
    the first failure gives the others up.
    """
    check_dimensions(num_dimensions, encoder.width)
    tasks = [asyncio.create_task(text_vector(lease.infer, model, encoder, ids, num_dimensions)) for ids in token_lists]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # their places are free when we return


async def text_vector(
    infer: Callable[[InferRequest], Awaitable[InferResponse]],
    model: str,
    encoder: Encoder,
    ids: Sequence[int],
    num_dimensions: int | None = None,
    **asked: Any,
) -> np.ndarray:
    """One text's vector, as `tensor.encoder.vector_of`; `asked` are more fields of its request."""
    request = InferRequest(
        request_id=new_id(),
        model=model,
        inputs=inputs_for(encoder, ids),
        outputs=(encoder.output,),
        num_tokens=len(ids),
        **asked,
    )
    (output,) = (await infer(request)).outputs
    return vector_of(encoder, output, len(ids), num_dimensions)
