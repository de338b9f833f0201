"""Facts of a served model, as plain data that crosses between processes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from maitred.core.request import PoolingFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The model in memory: how it is held, and what it takes; for people to look at."""

    architecture: str
    num_parameters: int
    executor: str
    device: str
    dtype: str  # of the weights
    kv_dtype: str
    weights_bytes: int
    kv_bytes: int
    isa: str = ""  # the instruction set; empty where the executor has none to choose
    proposer: str = ""  # name of the drafter, whose tokens the model checks; empty without one


class AdapterFacts(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that may be asked for, as its files were when they were checked."""

    name: str
    path: str  # of its folder
    digest: str  # sha256 of its files, in hex
    rank: int
    num_bytes: int  # in memory
    inside: str | None = None  # the folder that its files must not lead out of

    @property
    def key(self) -> str:
        """Key by which requests and the executor know the adapter: another one for other bytes."""
        return f"{self.name}@{self.digest[:16]}"


class ModelFacts(msgspec.Struct, frozen=True):
    """`ServedModel` without its text parts, and where those come from."""

    tokenizer_folder: str  # or the GGUF file
    chat_template: str | dict[str, str] | None  # its source, or those of several by name
    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float | int]
    created: int
    root: str
    revision: str
    block_size: int
    footprint: Footprint | None
    allow_special_tokens_in_content: bool = False
    tool_format: str | None = None  # None is what the chat template shows
    max_num_seqs: int = 0  # requests in one step; 0 where it is not known
    adapters: tuple[AdapterFacts, ...] = ()  # those named at the start
    pooling: PoolingFacts | None = None  # None where it is not known
