"""What KV from elsewhere brings and costs: `python benchmarks/kv_tiers.py [MODEL] [--parts ttft redis peer ...]`.

ttft: the first token of a prompt whose KV was computed before, and lost to another prompt, since the pool has room for
one. Computed again, read from files that the page cache has, and from files that it was told to drop; in turns.
redis: the same from a redis-server on this machine's loopback. peer: the same from another process, pulled over TCP.
throughput: unlike prompts that nobody repeats, with the tier and without, in turns of one round; medians of the ratios.
start: opening a folder of `--folder-bytes`, as the next server does.
Without MODEL, random weights of Qwen3-0.6B's shape, int8.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_start import make_checkpoint
from maitred import LLM, SamplingParams
from maitred.config import CacheConfig, EngineConfig, MachineShare, ModelConfig, SchedulerConfig, SpeculativeConfig
from maitred.engine.build import build_parts
from maitred.engine.intake import make_requests
from maitred.kv.disk import open_kv_disk
from tests.storage.redis_server import running_redis

Prompt = list[int]
ROUNDS = 3


def prompt_of(seed: int, num_tokens: int) -> Prompt:
    return random.Random(seed).choices(range(1000, 50_000), k=num_tokens)


def engine(
    options: argparse.Namespace, disk: Path | None, num_tokens: int, num_seqs: int = 1, redis: str | None = None
) -> LLM:
    """With a pool for so many tokens."""
    return LLM(
        options.model,
        dtype="int8",
        max_num_seqs=num_seqs,
        max_model_len=options.tokens + 64,
        kv_cache_memory_bytes=num_tokens // 16 * options.bytes_per_block,
        kv_disk=str(disk) if disk is not None else None,
        kv_disk_max_bytes=4 * 2**30,
        kv_redis=redis,
        speculative="off",
        num_threads=options.threads,
    )


def settled(llm: LLM) -> None:
    """Until all is stored."""
    parts = llm._open()
    assert parts.kv_tiers is not None
    while parts.kv_tiers.views()[0].waiting_blocks:
        time.sleep(0.01)
        parts.core.run_called()


def drop_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # what is not on the disk yet is not dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fill_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def first_token(llm: LLM, prompt: Prompt) -> tuple[float, int]:
    """Seconds, and tokens that were not computed."""
    began = time.perf_counter()
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))
    return time.perf_counter() - began, output.num_cached_tokens


def measure_ttft(options: argparse.Namespace, folder: Path) -> None:
    disk = folder / "ttft"
    kinds = {
        "disk, page cache": partial(fill_page_cache, disk),
        "disk, page cache dropped": partial(drop_page_cache, disk),
    }
    with engine(options, disk, options.tokens + 128) as llm:
        compare(options, llm, kinds)


def measure_redis(options: argparse.Namespace, folder: Path) -> None:
    with running_redis(folder) as server, engine(options, None, options.tokens + 128, redis=server.url) as llm:
        compare(options, llm, {"Redis": lambda: None})


def compare(options: argparse.Namespace, llm: LLM, kinds: dict[str, Callable[[], object]]) -> None:
    prompts = [prompt_of(seed, options.tokens) for seed in range(2)]
    first_token(llm, prompt_of(9, 64))  # warm
    computed = []
    for prompt in prompts:
        computed.append(first_token(llm, prompt)[0])
        settled(llm)  # else its blocks go to the next before they are copied
    turns = cycle(prompts)  # the one that comes next has lost its blocks to the other
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(2 * ROUNDS):
        for kind, before in kinds.items():
            before()
            took_s, cached = first_token(llm, next(turns))
            assert cached >= options.tokens - 16, f"{cached} tokens came from {kind}"
            found[kind].append(took_s)
    tell(options, computed, found)
    assert llm._open().kv_tiers is not None
    print(f"  {llm._open().kv_tiers.views()[0]}")


def tell(options: argparse.Namespace, computed: list[float], found: dict[str, list[float]]) -> None:
    print(f"first token of {options.tokens} tokens: computed {statistics.median(computed) * 1e3:,.0f} ms")
    for kind, seconds in found.items():
        took_s = statistics.median(seconds)
        print(
            f"  from {kind}: {took_s * 1e3:,.0f} ms = {statistics.median(computed) / took_s:.1f} x as fast", flush=True
        )


# ---- a peer


class Peer:
    """An engine that gives and takes KV over TCP, stepped here."""

    def __init__(self, options: argparse.Namespace, num_tokens: int) -> None:
        bytes_ = num_tokens // 16 * options.bytes_per_block
        self.parts = build_parts(
            EngineConfig(
                model=ModelConfig(
                    model=options.model, dtype="int8", max_model_len=options.tokens + 64, num_threads=options.threads
                ),
                cache=CacheConfig(kv_cache_memory_bytes=bytes_, kv_transport="tcp"),
                scheduler=SchedulerConfig(max_num_seqs=1),
                speculative=SpeculativeConfig(speculative="off"),
                share=MachineShare(exchanges_kv=True),
            )
        )
        self.core, self.woken, self._num = self.parts.core, threading.Event(), 0
        self.core.wake = self.woken.set

    def first_token(self, prompt: Prompt, kv_from: tuple[str, ...] = ()) -> tuple[float, int]:
        """Seconds, and tokens that were not computed."""
        self._num += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        began = time.perf_counter()
        (spec,) = make_requests(
            self.parts.model, prompt, sampling, request_id=str(self._num), now=self.core._clock.now()
        )
        state = self.core.add(msgspec.structs.replace(spec, kv_from=kv_from))
        while self.core.has_work:
            if not self.core.can_step:
                self.woken.wait()
            self.woken.clear()
            self.core.run_called()
            self.core.step()
        return time.perf_counter() - began, state.num_cached_tokens


def give(options: argparse.Namespace) -> None:
    peer = Peer(options, 2 * options.tokens + 256)
    for seed in range(2):
        peer.first_token(prompt_of(seed, options.tokens))
    assert peer.parts.kv_peers is not None
    print(*peer.parts.kv_peers.gives.addresses, flush=True)
    while True:
        peer.woken.wait()
        peer.woken.clear()
        peer.core.run_called()


def resident_bytes(pid: int) -> int:
    """Memory that a process has, but for files'."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def measure_peer(options: argparse.Namespace, folder: Path) -> None:
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    command = [sys.executable, __file__, options.model, "--give", "--tokens", str(options.tokens), *threads]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        try:
            peer, prompts = Peer(options, options.tokens + 128), [prompt_of(seed, options.tokens) for seed in range(2)]
            peer.first_token(prompt_of(9, 64))  # warm
            computed = [peer.first_token(prompt_of(10 + number, options.tokens))[0] for number in range(2)]
            pids, pulled = {"who gives": child.pid, "who pulls": os.getpid()}, []
            before = {name: resident_bytes(pid) for name, pid in pids.items()}  # the pools are touched
            for prompt in prompts * ROUNDS * 2:
                took_s, cached = peer.first_token(prompt, (address,))
                assert cached >= options.tokens - 16, f"{cached} tokens came from the peer"
                pulled.append(took_s)
            tell(options, computed, {"a peer over TCP": pulled[2:]})
            for name, pid in pids.items():
                more = (resident_bytes(pid) - before[name]) / 2**20
                print(f"  transfers took {more:.0f} MiB of {name} (256 MiB)")
            peer.parts.close()
        finally:
            child.kill()


def measure_throughput(options: argparse.Namespace, folder: Path) -> None:
    rounds = 3 * ROUNDS
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ratios = []
    room = max(8 * (128 + 32), options.tokens + 64)  # a context of the model's must fit
    with engine(options, None, room, 8) as without, engine(options, folder / "on", room, 8) as with_tier:
        for number in range(1 + rounds):
            rates = []
            for side, llm in enumerate((without, with_tier)):
                prompts = [prompt_of(1000 * number + 100 * side + i, 128) for i in range(8)]
                began = time.perf_counter()
                llm.generate(prompts, sampling)
                rates.append(8 * 24 / (time.perf_counter() - began))
            if number:  # the first round warms
                ratios.append(rates[1] / rates[0])
    print(
        f"tokens/s with the tier, no hits, against without: {statistics.median(ratios):.3f} of "
        + ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    )


def measure_start(options: argparse.Namespace, folder: Path) -> None:
    size, disk = options.bytes_per_block, folder / "full"
    rows = memoryview(os.urandom(64 * size))
    tier = open_kv_disk(disk, max_bytes=2 * options.folder_bytes, bytes_per_block=size, fingerprint="a model")
    for first in range(0, options.folder_bytes // size, 64):
        tier.write([(first + i).to_bytes(32, "big") for i in range(64)], rows)
    tier.close()
    began = time.perf_counter()
    tier = open_kv_disk(disk, max_bytes=2 * options.folder_bytes, bytes_per_block=size, fingerprint="a model")
    took_s = time.perf_counter() - began
    print(
        f"opening a folder of {tier.stats.num_bytes / 2**30:.2f} GiB, {tier.stats.num_blocks:,} blocks: {took_s:.3f} s"
    )
    tier.close()


PARTS = {
    "ttft": measure_ttft,
    "redis": measure_redis,
    "peer": measure_peer,
    "throughput": measure_throughput,
    "start": measure_start,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder-bytes", type=int, default=2**30)
    parser.add_argument("--give", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where the tier's files lie; a temporary folder otherwise")
    options = parser.parse_args()
    options.bytes_per_block = 28 * 2 * 16 * 8 * 128 * 2  # of the shape below, bfloat16
    if options.give:
        return give(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.model is None and set(options.parts) != {"start"}:
            options.model = str(make_checkpoint(folder / "model"))
        for part in options.parts:
            PARTS[part](options, folder)


if __name__ == "__main__":
    main()
