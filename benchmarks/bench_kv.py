"""What KV that was stored brings a prompt that returns: the first token computed, and read from disk or Redis.

    python benchmarks/bench_kv.py [disk] [redis] [--model MODEL] [--tokens 2048] [--rounds 6]

The pool has room for one prompt of so many tokens, so each of two that take turns has lost its blocks to the other.
`disk` reads files that the page cache has, and files that it was told to drop; `redis` asks a redis-server on this
machine's loopback. Printed are medians and how many times as fast as computing the prompt they are (aims: disk 10,
dropped 4, Redis 2). Without MODEL, random weights of Qwen3-0.6B's shape in int8.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import httpx
from harness import make_checkpoint, served

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.storage.redis_server import running_redis

BYTES_OF_TOKEN = 28 * 2 * 8 * 128 * 2  # of Qwen3-0.6B's shape, in bfloat16
PARTS = ("disk", "redis")


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(300, 8000), k=num_tokens)


def drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # what is not on the disk yet is not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fill_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def measure(part: str, model: str, folder: Path, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        disk, before = folder / "kv", dict[str, Callable[[], object]]()
        if part == "disk":
            flags = ("--kv-disk", str(disk))
            before = {"page cache": lambda: fill_page_cache(disk), "dropped": lambda: drop_page_cache(disk)}
        else:
            flags = ("--kv-redis", stack.enter_context(running_redis(folder)).url)
            before = {"redis": lambda: None}
        pool = str((options.tokens + 128) * BYTES_OF_TOKEN)
        limits = ("--max-model-len", str(options.tokens + 64), "--max-num-seqs", "1", "--kv-cache-memory-bytes", pool)
        server = stack.enter_context(served(model, "--dtype", "int8", "--speculative", "off", *limits, *flags))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=600))

        def first_token(prompt: list[int]) -> tuple[float, int]:
            """Milliseconds, and tokens that were not computed."""
            began = time.perf_counter()
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            return (time.perf_counter() - began) * 1e3, usage["prompt_tokens_details"]["cached_tokens"]

        def settle() -> None:
            """Until all is stored, else a prompt's blocks go to the next before they are copied."""
            while any(tier["waiting_blocks"] for tier in client.get("/admin/kv").json()["tiers"]):
                time.sleep(0.01)

        prompts, computed = [prompt_of(seed, options.tokens) for seed in range(2)], []
        first_token(prompt_of(9, 64))  # warm
        for prompt in prompts:
            computed.append(first_token(prompt)[0])
            settle()
        turns, found = cycle(prompts), {kind: list[float]() for kind in before}
        for _ in range(options.rounds):
            for kind, prepare in before.items():
                prepare()
                took_ms, cached = first_token(next(turns))
                assert cached >= options.tokens - 16, f"{cached} tokens came from {kind}"
                found[kind].append(took_ms)
    own_ms = statistics.median(computed)
    print(f"{part}: {options.tokens} tokens, computed {own_ms:,.0f} ms", end="")
    for kind, times in found.items():
        print(
            f"; {kind} {statistics.median(times):,.0f} ms, {own_ms / statistics.median(times):.1f} times as fast",
            end="",
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="maitred-bench-") as root:
        model = options.model or str(make_checkpoint(Path(root) / "model"))
        for part in options.parts or ["disk"]:
            folder = Path(root) / part
            folder.mkdir()
            measure(part, model, folder, options)


if __name__ == "__main__":
    main()
