"""Prefix cache: blocks found by a chain of sha256 over tokens, salted so that tenants cannot probe each other.

The hash of block i covers every token up to its end, because it hashes the hash of block i - 1 along with its own
tokens: equal hash means equal prefix, and a lookup is one dict access for each block.
Source: vLLM's automatic prefix caching, after RadixAttention (SGLang, Zheng et al. 2023, arXiv:2312.07104).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import sha256
from itertools import islice
from struct import Struct
from typing import Generic, TypeVar

from maitred.core.request import RequestState

Item = TypeVar("Item", bound=Hashable)
BlockHasher = Callable[[RequestState, int], Iterable[bytes]]
"""(request, num_blocks) -> hashes of its full blocks from len(request.block_hashes) up to num_blocks, in order."""


def root_hash(model_identity: str, cache_salt: str = "") -> bytes:
    """Return the parent of the first block's hash: unlike models and unlike salts never share a block."""
    digest = sha256()
    for part in (model_identity.encode(), cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)  # the length keeps ("ab", "c") from ("a", "bc")
    return digest.digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, root: bytes) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, each of 32 bytes; `root` is what comes before them.

    Takes about 1 us for a block of 16, so it is called at intake, never by the scheduler. Token ids fit in 32 bits.
    """
    pack = Struct(f"<{block_size}I").pack
    parent, hashes = root, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = sha256(parent + pack(*token_ids[start : start + block_size])).digest()
        hashes.append(parent)
    return hashes


class TokenHasher:
    """The live BlockHasher: hashes tokens. Replay and simulator have hashes instead, and their own BlockHasher."""

    def __init__(self, block_size: int, model_identity: str) -> None:
        self._block_size = block_size
        self._model_identity = model_identity

    def hash_prompt(self, token_ids: Sequence[int], cache_salt: str = "") -> list[bytes]:
        """Hash a prompt for `RequestState.block_hashes`, at intake."""
        return hash_blocks(token_ids, self._block_size, root_hash(self._model_identity, cache_salt))

    def __call__(self, request: RequestState, num_blocks: int) -> list[bytes]:
        known = request.block_hashes
        parent = known[-1] if known else root_hash(self._model_identity, request.spec.cache_salt)
        start, end = len(known) * self._block_size, num_blocks * self._block_size
        return hash_blocks(known_tokens(request, start, end), self._block_size, parent)


def known_tokens(request: RequestState, start: int, end: int) -> list[int]:
    """Prompt and output in [start, end)."""
    num_prompt = request.num_prompt_tokens
    tokens = list(request.spec.prompt_token_ids[start:end])
    tokens += request.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]
    return tokens


class Changes(Generic[Item]):
    """Items that came and went since last told, net: an item that came and went again is no news.

    Bounded by what is held and what was: nothing in it is an event, all is a difference.
    """

    def __init__(self, held: Iterable[Item] = ()) -> None:
        """`held` is there already, and told first."""
        self._is_stored: dict[Item, bool] = dict.fromkeys(held, True)

    def __len__(self) -> int:
        return len(self._is_stored)

    def stored(self, item: Item) -> None:
        """Note an item that was not there before."""
        if self._is_stored.pop(item, True):
            self._is_stored[item] = True

    def removed(self, item: Item) -> None:
        """Note an item that was there."""
        if not self._is_stored.pop(item, False):
            self._is_stored[item] = False

    def take(self, most: int) -> tuple[list[Item], list[Item]]:
        """(stored, removed): up to `most` in all, those that wait for longest, told no more."""
        taken = {item: self._is_stored.pop(item) for item in list(islice(self._is_stored, most))}
        return [item for item, stored in taken.items() if stored], [
            item for item, stored in taken.items() if not stored
        ]


class PrefixCache:
    """hash -> block and back. A block stays findable while it is free, until the pool hands it out again."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self.hashes: dict[int, bytes] = {}  # block -> hash; its keys are the findable blocks
        self.changes: Changes[bytes] | None = None  # of the hashes, while they are told

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def block_of(self, digest: bytes) -> int | None:
        return self._blocks.get(digest)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain."""
        blocks, found = self._blocks, []
        for digest in hashes:
            block = blocks.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, digest: bytes, block: int) -> None:
        """Makes a full, computed block findable. Of two blocks with equal contents the first keeps the name."""
        if digest not in self._blocks:
            assert block not in self.hashes, f"block {block} was rewritten while it was findable"
            self._blocks[digest] = block
            self.hashes[block] = digest
            if self.changes is not None:
                self.changes.stored(digest)

    def forget(self, block: int) -> bytes | None:
        """The block is about to hold something else: its hash, None for one that was not findable."""
        digest = self.hashes.pop(block, None)
        if digest is not None:
            del self._blocks[digest]
            if self.changes is not None:
                self.changes.removed(digest)
        return digest

    def check_invariants(self) -> None:
        """Asserts that both directions agree."""
        assert len(self._blocks) == len(self.hashes)
        assert all(self._blocks[digest] == block for block, digest in self.hashes.items())
