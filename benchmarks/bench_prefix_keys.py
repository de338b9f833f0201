"""Prefix keys: what they cost at a router and at a replica, and what they find of what hashes of tokens find.

    python benchmarks/bench_prefix_keys.py [--conversations 200] [--replicas 8] [--blocks 2500] [--seed 0]

Time to read a body and make its keys (aim: 15 us for 1 KB); a look-up in an index of 100,000 keys over 16 replicas
(10 us for 64 keys, 60 us for 4,096); beside tokenising, what a replica takes to find the block that
each key ends in. Then conversations in the words of docs/ over simulated replicas whose caches evict: each turn goes
where most of its prefix is thought to be, once by the hashes of its tokens, which no router has, once by keys. Keys are
to lose at most 3% of the hits; `foretold` is what they promised of what was then found there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from maitred.core.request import RequestSpec, RequestState, SamplingParams
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.prefix_keys import PrefixKeys, prefix_keys, read_body
from maitred.fleet.stored_keys import KeyBlock, StoredKeys, TokenLengths, ends_of_tokens, tokens_of_keys
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import Changes, TokenHasher
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.folder import read_chat_template
from maitred.text.parts import FolderText, TextParts
from maitred.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
HASHER = TokenHasher(BLOCK_SIZE, "bench")
Message = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2500, help="of each replica's cache")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = paragraphs()
    reading(texts)
    looking_up(random.Random(args.seed))
    text = FolderText(BUILTIN_FOLDER, read_chat_template(BUILTIN_FOLDER)).read()
    locating(text, texts)
    turns = list(conversations(text, texts, args.conversations, random.Random(args.seed)))
    routed(turns, args.replicas, args.blocks)


def paragraphs() -> list[str]:
    root = Path(__file__).resolve().parent.parent
    documents = [path.read_text() for path in sorted(root.glob("docs/**/*.md"))]
    return [each.strip() for text in documents for each in re.split(r"\n\n+", text) if 40 < len(each) < 3000]


def best_us(function: Callable[[], object], number: int) -> float:
    """The best of 50 runs of `number` calls: short ones, so that on a busy machine some are undisturbed."""
    times = []
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(number):
            function()
        times.append((time.perf_counter() - began) / number)
    return min(times) * 1e6


def body_of(messages: list[Message]) -> bytes:
    return json.dumps({"model": "mini", "messages": messages, "max_tokens": 200, "stream": True}).encode()


def messages_of(texts: list[str], num_bytes: int) -> list[Message]:
    messages, at = [], 0
    while (left := num_bytes - at) > 0:
        content = texts[len(messages)][: max(1, left - 40)]
        messages.append({"role": "user" if len(messages) % 2 else "system", "content": content})
        at += len(content) + 40
    return messages


def reading(texts: list[str]) -> None:
    print("body       keys   read us   read and keys us")
    for num_bytes in (1024, 16 * 1024, 256 * 1024):
        body = body_of(messages_of(texts, num_bytes))
        number = max(1, 100_000 // num_bytes)
        whole = best_us(lambda body=body: prefix_keys(read_body(body)), number)
        read = best_us(lambda body=body: read_body(body), number)
        print(f"{len(body):8,} {len(prefix_keys(read_body(body)).keys):6} {read:9.1f} {whole:12.1f}")


def looking_up(rng: random.Random) -> None:
    index = PrefixIndex()
    for _ in range(2000):
        index.stored(rng.randrange(16), [rng.getrandbits(64) for _ in range(50)])
    print(f"\nlook-up over 16 replicas, {index.num_keys:,} keys in the index")
    print("keys   replicas that have some   us")
    for num_keys in (64, 4096):
        for depths in ({num_keys // 2}, {num_keys * i // 17 for i in range(1, 17)}):
            keys = [rng.getrandbits(64) for _ in range(num_keys)]
            for bit, depth in zip(range(16), sorted(depths) * 16, strict=False):
                index.stored(bit, keys[:depth])
            asked = [int(str(key)) for key in keys]
            took = best_us(lambda asked=asked: index.hits(asked, 0xFFFF), 20)
            print(f"{num_keys:5} {f'16, at {len(depths)} depths':>24} {took:7.1f}")


def locating(text: TextParts, texts: list[str]) -> None:
    print("\nbody      tokens   tokenise us   keys and their blocks us")
    for num_bytes in (1024, 16 * 1024):
        messages = messages_of(texts, num_bytes)
        sent, prompt = body_of(messages), text.chat_template.render(messages)
        ids = text.tokenizer.encode(prompt)
        tokenising = best_us(lambda prompt=prompt: text.tokenizer.encode(prompt), 1)
        finding = best_us(lambda sent=sent, prompt=prompt, ids=ids: found_in(text, sent, prompt, ids), 1)
        print(f"{len(sent):7,} {len(ids):8} {tokenising:13.0f} {finding:17.0f}")


def found_in(text: TextParts, sent: bytes, prompt: str, ids: list[int]) -> tuple[PrefixKeys, list[int]]:
    """The keys of a body, and how many tokens each determines."""
    body = read_body(sent)
    keys = prefix_keys(body)
    lengths = lengths_of(text.tokenizer)
    return keys, tokens_of_keys(body, keys, prompt, lambda: ends_of_tokens(prompt, ids, lengths))


@cache
def lengths_of(tokenizer: Tokenizer) -> TokenLengths:
    return TokenLengths(tokenizer.token_bytes)


# ---- conversations over replicas


@dataclass(frozen=True)
class Turn:
    """One request as both kinds of router see it."""

    keys: PrefixKeys
    chain: list[KeyBlock]
    num_tokens: int
    hashes: list[bytes]  # of the prompt's full blocks
    known: tuple[int, ...]  # tokens in the cache when it has ended: prompt and answer
    known_hashes: list[bytes]


def conversations(text: TextParts, texts: list[str], count: int, rng: random.Random) -> Iterator[Turn]:
    """Their turns, mixed: each begins with one of ten system prompts, the first far more often than the last."""
    systems = ["\n".join(rng.sample(texts, 3)) for _ in range(10)]
    weights = [1 / (rank + 1) for rank in range(10)]
    open_ones: list[tuple[list[Message], int]] = []
    num_begun = 0
    while num_begun < count or open_ones:
        if num_begun < count and (len(open_ones) < 40 or rng.random() < 0.2):
            system = rng.choices(systems, weights)[0]
            open_ones.append(([{"role": "system", "content": system}], rng.randint(1, 8)))
            num_begun += 1
        messages, left = open_ones.pop(rng.randrange(len(open_ones)))
        messages = [*messages, {"role": "user", "content": rng.choice(texts)}]
        answered = [*messages, {"role": "assistant", "content": rng.choice(texts)}]
        yield turn_of(text, messages, answered)
        if left > 1:
            open_ones.append((answered, left - 1))


def turn_of(text: TextParts, messages: list[Message], answered: list[Message]) -> Turn:
    prompt = text.chat_template.render(messages)
    ids = text.tokenizer.encode(prompt, add_special_tokens=False)
    known = text.tokenizer.encode(
        text.chat_template.render(answered, continue_final_message=True), add_special_tokens=False
    )
    hashes = HASHER.hash_prompt(ids)
    keys, counts = found_in(text, body_of(messages), prompt, ids)
    ends = [count // BLOCK_SIZE for count in counts]
    chain = [KeyBlock(key, hashes[end - 1] if end else None) for key, end in zip(keys.keys, ends, strict=True)]
    return Turn(keys, chain, len(ids), hashes, tuple(known), HASHER.hash_prompt(known))


@dataclass
class Replica:
    """A cache as the engine has it, and what it tells of its keys."""

    kv: KVCacheManager
    number: int
    keys: StoredKeys = field(default_factory=StoredKeys)
    num_served_tokens: int = 0

    def __post_init__(self) -> None:
        self.kv.tell_changes(True)
        self.news: Changes[int] = self.keys.listen()

    def num_hit_tokens(self, turn: Turn) -> int:
        usable = turn.hashes[: (turn.num_tokens - 1) // BLOCK_SIZE]
        return BLOCK_SIZE * len(self.kv._cache.find(usable))

    def serve(self, turn: Turn, index: PrefixIndex) -> None:
        self.num_served_tokens += turn.num_tokens
        state = RequestState(made(turn))
        admitted = self.kv.admit(state, self.kv.find_prefix(state))
        assert admitted is not None, "more --blocks are needed for the longest conversation"
        self.keys.note(turn.chain)
        self.kv.commit(state, 0, len(turn.known))
        self.kv.free(state)
        changes = self.kv.changes
        assert changes is not None
        self.keys.blocks_changed(*changes.take(10**9))
        stored, removed = self.news.take(10**9)
        index.removed(self.number, removed)
        index.stored(self.number, stored)


def made(turn: Turn) -> RequestSpec:
    return RequestSpec(
        request_id="",
        prompt_token_ids=turn.known,
        num_prompt_tokens=len(turn.known),
        sampling=SamplingParams(),
        arrived_at=0.0,
        max_tokens=1,
        seed=0,
        block_hashes=list(turn.known_hashes),
    )


def routed(turns: list[Turn], num_replicas: int, num_blocks: int) -> None:
    num_tokens = sum(turn.num_tokens for turn in turns)
    print(f"\n{len(turns)} turns, {num_tokens:,} tokens, {num_replicas} caches of {num_blocks} blocks")
    print("routed by     hit ratio   most served / mean   foretold / found")
    by_tokens = run("tokens", turns, num_replicas, num_blocks)
    by_keys = run("keys", turns, num_replicas, num_blocks)
    run("nothing", turns, num_replicas, num_blocks)
    print(f"keys lose {100 * (1 - by_keys / by_tokens):.2f}% of the hits (the aim: 3% at most)")


def run(by: str, turns: list[Turn], num_replicas: int, num_blocks: int) -> int:
    """Tokens found."""
    index, num_found, num_foretold = PrefixIndex(), 0, 0
    replicas = [
        Replica(KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, hasher=HASHER), number)
        for number in range(num_replicas)
    ]
    for number, turn in enumerate(turns):
        foretold = foretold_tokens(turn, index, num_replicas)
        chosen = replicas[number % num_replicas]
        if by != "nothing":
            thought = foretold if by == "keys" else [each.num_hit_tokens(turn) for each in replicas]
            chosen = max(replicas, key=lambda each, t=thought: (t[each.number], -each.num_served_tokens))
        num_found += chosen.num_hit_tokens(turn)
        num_foretold += foretold[chosen.number]
        chosen.serve(turn, index)
    served = [each.num_served_tokens for each in replicas]
    ratio = num_found / sum(served)
    print(f"{by:12} {ratio:10.3f} {max(served) / statistics.mean(served):15.2f} {num_foretold / num_found:19.3f}")
    return num_found


def foretold_tokens(turn: Turn, index: PrefixIndex, num_replicas: int) -> list[int]:
    """As a router estimates: the bytes up to the deepest key, at this prompt's tokens a byte."""
    thought = [0] * num_replicas
    for hit in index.hits(turn.keys.keys, (1 << num_replicas) - 1):
        share = turn.keys.ends[hit.num_keys - 1] / turn.keys.ends[-1]
        for bit in range(num_replicas):
            if hit.replicas >> bit & 1:
                thought[bit] = int(share * turn.num_tokens)
    return thought


if __name__ == "__main__":
    main()
