"""What a fleet of live replicas of the built-in model keeps of three promises, a minute each.

    python benchmarks/bench_live_fleet.py [keys] [warm] [redis]

`keys`: conversations in the words of this project's documents over --replicas 3, each turn sent where most of its
prefix is thought to be; once by what replicas tell of prefix keys, once by the hashes of its tokens, which no router
has. Hits are what replicas say in `usage`. The aim: keys lose at most 3% of them.
`warm`: of a made-up model of 190 MB, the first tokens of a burst at a replica that was kept warm, beside those of one
that has served; the aim is at most 1.2 times as long, in each of --rounds 3. And what the two have of the packed
weights, by /proc/PID/smaps: the share of each in common pages is half of them when they are mapped once.
`redis`: p99 of the time to the first token at a router with a result cache in Redis, which is well, frozen, or slow by
300 ms; the aim is 50 ms more at most, and no failed request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_prefix_keys import HASHER, Message, paragraphs
from benchmarks.bench_start import QWEN3_06B, make_checkpoint
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.prefix_keys import prefix_keys
from maitred.fleet.replica_events import FleetEvent, KeysChanged
from maitred.fleet.routed_body import read_body
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.model.packaged import default_folder
from maitred.text import FolderText
from maitred.text.folder import read_chat_template
from tests.conftest import start_server
from tests.fleet.test_end_to_end import start_router
from tests.storage.redis_server import RunningRedis, slow_proxy

CHAT = "/v1/chat/completions"
TOKEN = "0123456789abcdef0123456789abcdef"
MAX_PROMPT_TOKENS = 1900
_decode = msgspec.json.Decoder(FleetEvent).decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=list(PARTS))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    args = parser.parse_args()
    for part in args.parts:
        PARTS[part](args)


# ---- keys


def by_keys(args: argparse.Namespace) -> None:
    text = FolderText(BUILTIN_FOLDER, read_chat_template(BUILTIN_FOLDER)).read()
    turns = [
        (messages, hashes)
        for messages in conversations(paragraphs(), args.conversations, random.Random(0))
        if (hashes := HASHER.hash_prompt(text.tokenizer.encode(text.chat_template.render(messages))))
        and len(hashes) * 16 < MAX_PROMPT_TOKENS
    ]
    nothing, tokens, keys = (hits_of(args.replicas, turns, route) for route in (ByNothing, ByTokens, ByKeys))
    print(f"{len(turns)} turns, {args.replicas} replicas; tokens found: {nothing:,} by load alone,", end=" ")
    print(f"{tokens:,} by hashes of tokens, {keys:,} by keys")
    print(f"keys lose {100 * (1 - keys / tokens):.2f}% of the hits (the aim: 3% at most)")


def conversations(texts: list[str], count: int, rng: random.Random) -> Iterator[list[Message]]:
    """What is asked, of all conversations mixed: each begins with one of ten system prompts."""
    systems = ["\n".join(rng.sample(texts, 2))[:1500] for _ in range(10)]
    open_ones = [([{"role": "system", "content": rng.choice(systems)}], rng.randint(1, 6)) for _ in range(count)]
    while open_ones:
        messages, left = open_ones.pop(rng.randrange(len(open_ones)))
        messages = [*messages, {"role": "user", "content": rng.choice(texts)[:800]}]
        yield messages
        if left > 1:
            open_ones.append(([*messages, {"role": "assistant", "content": rng.choice(texts)[:400]}], left - 1))


class ByNothing:
    """Knows of no prefix."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._num = len(urls)

    def found(self, body: bytes, hashes: list[bytes]) -> list[int]:
        return [0] * self._num

    def sent(self, number: int, hashes: list[bytes]) -> None:
        """It forgets that."""


class ByTokens:
    """Knows the hashes of all blocks that were computed where."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._known: list[set[bytes]] = [set() for _ in urls]

    def found(self, body: bytes, hashes: list[bytes]) -> list[int]:
        return [next((i for i, each in enumerate(hashes) if each not in known), len(hashes)) for known in self._known]

    def sent(self, number: int, hashes: list[bytes]) -> None:
        self._known[number].update(hashes)


class ByKeys:
    """Knows what replicas tell of their keys."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._index, self._num = PrefixIndex(), len(urls)
        self._lock = threading.Lock()
        for number, url in enumerate(urls):
            threading.Thread(target=self._listen, args=(number, url), daemon=True).start()

    def _listen(self, number: int, url: str) -> None:
        headers = {"x-maitred-fleet-token": TOKEN}
        try:
            with httpx.stream("GET", url + "/fleet/events", headers=headers, timeout=None) as answer:
                for line in answer.iter_lines():
                    event = _decode(line[6:]) if line.startswith("data: {") else None
                    if isinstance(event, KeysChanged):
                        with self._lock:
                            self._index.removed(number, event.removed)
                            self._index.stored(number, event.stored)
        except httpx.HTTPError:
            return  # the replica has ended

    def found(self, body: bytes, hashes: list[bytes]) -> list[int]:
        with self._lock:
            hits = self._index.hits(prefix_keys(read_body(body)).keys, (1 << self._num) - 1)
        counts = [0] * self._num
        for hit in reversed(hits):
            for number in range(self._num):
                if hit.replicas >> number & 1:
                    counts[number] = max(counts[number], hit.num_keys)
        return counts

    def sent(self, number: int, hashes: list[bytes]) -> None:
        """It tells itself."""


def hits_of(
    num_replicas: int,
    turns: list[tuple[list[Message], list[bytes]]],
    route: Callable[[list[str]], ByNothing | ByTokens | ByKeys],
) -> int:
    with replicas(num_replicas) as urls, httpx.Client(timeout=60) as client:
        router = route(urls)
        time.sleep(0.5)  # until it listens
        served, num_found = [0] * num_replicas, 0
        for messages, hashes in turns:
            body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
            found = router.found(body, hashes)
            number = max(range(num_replicas), key=lambda each, f=found: (f[each], -served[each]))
            answer = client.post(urls[number] + CHAT, content=body, headers=ROUTERS)
            usage = answer.raise_for_status().json()["usage"]
            num_found += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            served[number] += usage["prompt_tokens"]
            router.sent(number, hashes)
        return num_found


ROUTERS = {"content-type": "application/json", "x-maitred-fleet-token": TOKEN}


@contextmanager
def replicas(count: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        running = [start_server("--fleet-token-file", str(token)) for _ in range(count)]
        for each in running:
            stack.callback(each.stop)
        yield [each.url for each in running]


# ---- warm

SMALLER = {"vocab_size": 32_000, "num_hidden_layers": 4}  # 190 MB


def warm(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the built-in model is too small for its packed weights to be kept
        warm_of(make_checkpoint(Path(folder) / "model", QWEN3_06B | SMALLER), args.rounds)


def warm_of(model: Path, num_rounds: int) -> None:
    ratios = []
    for number in range(num_rounds):
        router = start_router("--replicas", "1:3", "--warm", "1", "--", str(model), "--max-model-len", "2048")
        try:
            by_state = wait_for_warm(router.url)
            if not number:
                print_weights([each["pid"] for each in by_state.values()])
            for _ in range(3):
                burst(by_state["ready"]["url"])
            ratios.append(burst(by_state["warm"]["url"]) / burst(by_state["ready"]["url"]))
        finally:
            router.stop()
    told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"first tokens of a burst on a warm one: {told} times those on one that has served (the aim: 1.2 at most)")


def wait_for_warm(url: str) -> dict[str, dict[str, Any]]:
    while True:
        found = {each["state"]: each for each in httpx.get(url + "/admin/fleet", timeout=60).json()["replicas"]}
        if {"ready", "warm"} <= found.keys():
            return {state: found[state] for state in ("ready", "warm")}
        time.sleep(0.1)


def burst(url: str) -> float:
    """Median time to the first token of eight at once, of prompts that nobody has asked."""
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=url, timeout=60) as client:
        prompts = [f"{random.random()} tell me a story of the sea and of those who sail on it" * 4 for _ in range(8)]
        return statistics.median(pool.map(lambda prompt: ttft_s(client, prompt), prompts))


def ttft_s(client: httpx.Client, prompt: str, **fields: Any) -> float:
    body = {"prompt": prompt, "max_tokens": 8, "stream": True, **fields}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.status_code
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        took_s = time.perf_counter() - began
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    return took_s


def print_weights(servers: Sequence[int]) -> None:
    for pid in servers:
        engines = psutil.Process(pid).children(recursive=True)
        sums = [mapped_kib(engine.pid, str(default_folder())) for engine in engines]
        rss, pss = max(sums, default=(0, 0))
        print(f"replica {pid}: {rss:,} KiB of packed weights mapped, its share of them {pss:,} KiB")


def mapped_kib(pid: int, folder: str) -> tuple[int, int]:
    """Resident, and in proportion to those who share the pages; of files in the folder."""
    rss = pss = 0
    is_of_it = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_it = folder in line
        elif is_of_it and line.startswith(("Rss:", "Pss:")):
            kib = int(line.split()[1])
            rss, pss = (rss + kib, pss) if line.startswith("Rss") else (rss, pss + kib)
    return rss, pss


# ---- redis


def redis(args: argparse.Namespace) -> None:
    asyncio.run(with_redis(args.requests))


async def with_redis(num_requests: int) -> None:
    with tempfile.TemporaryDirectory() as folder, replicas(1) as urls:
        server = RunningRedis(Path(folder))
        server.start()
        try:
            async with slow_proxy(server.port) as proxy:
                flags = ("--redis", f"redis://127.0.0.1:{proxy.port}", "--result-cache-bytes", "10000000")
                router = await asyncio.to_thread(start_router, *urls, *flags)
                await p99_s(router.url, num_requests // 2)  # it has begun to serve
                well = await p99_s(router.url, num_requests)
                server.freeze()
                frozen = await p99_s(router.url, num_requests)
                server.thaw()
                await asyncio.sleep(10.0)  # it is used again
                again = await p99_s(router.url, num_requests)
                slowing = asyncio.create_task(slow_by(proxy.passing, 0.3))
                slow = await p99_s(router.url, num_requests)
                slowing.cancel()
                await asyncio.to_thread(router.stop)
        finally:
            server.kill()
    print(f"Redis well: p99 of first tokens {1000 * well:.1f} ms before, {1000 * again:.1f} ms between; 0 failed")
    for name, p99, before in (("frozen", frozen, well), ("slow by 300 ms", slow, again)):
        more = f"{1000 * (p99 - before):+.1f} ms"
        print(f"Redis {name}: p99 of first tokens {1000 * p99:.1f} ms, {more} (the aim: +50 at most); 0 failed")


async def slow_by(passing: asyncio.Event, seconds: float) -> None:
    """Answers pass in a moment each so often."""
    while True:
        passing.clear()
        await asyncio.sleep(seconds)
        passing.set()
        await asyncio.sleep(0.001)


async def p99_s(url: str, num_requests: int) -> float:
    """Four at once, each of a prompt of its own that could be in the cache."""

    def ask() -> list[float]:
        with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=url, timeout=60) as client:
            prompts = [f"{random.random()} tell me" for _ in range(num_requests)]
            return list(pool.map(lambda prompt: ttft_s(client, prompt, temperature=0), prompts))

    return statistics.quantiles(await asyncio.to_thread(ask), n=100)[98]


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {"keys": by_keys, "warm": warm, "redis": redis}


if __name__ == "__main__":
    main()
