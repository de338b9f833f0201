"""What scripts/gpu-check does in Python: unpacks wheels that the machine lacks, then tests, compares and measures.

What is found is printed and written to the JSON file at once; exits with 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SLOWEST_RATES_S = 330.0  # after so long no further rate is begun
Rows = Iterator[tuple[str, str, bool]]  # what, what was found, whether it is as it should be


def unpack(wheels: Path, site: Path) -> None:
    """Into `site`: each wheel of this Python whose package is not installed."""
    own = (f"cp3{sys.version_info.minor}", "abi3")
    for wheel in sorted(wheels.glob("*.whl")):
        name, (python, abi) = wheel.stem.split("-")[0], wheel.stem.split("-")[-3:-1]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if abi in own or (abi == "none" and "py3" in python):
                zipfile.ZipFile(wheel).extractall(site)
            else:
                print(f"{wheel.name} is for another Python than {sys.version.split()[0]}, which lacks {name}")


@dataclass
class Check:
    """The sections; in small on a CPU, which is a rehearsal."""

    device: str
    folder: Path
    began_at: float = field(default_factory=time.monotonic)
    ceilings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tiny = self.device == "cpu"

    def llm(self, model: str | None, **settings: Any) -> Any:
        from maitred import LLM

        return LLM(model, **{"executor": "torch", "device": self.device} | settings)

    def machine(self) -> Rows:
        import torch

        yield "PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}", True
        if not self.tiny:
            properties = torch.cuda.get_device_properties(0)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            yield "GPU", f"{properties.name}, {memory}, {properties.multi_processor_count} multiprocessors", True

    def tests(self) -> Rows:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/executor"]
        done = subprocess.run(
            [*command, "-rf", "--timeout=90"], capture_output=True, text=True, check=False, timeout=180
        )
        lines = done.stdout.strip().splitlines()
        for line in [line for line in lines if line.startswith("FAILED")][:20]:
            yield "pytest -m gpu", line, False
        last = lines[-1] if lines else done.stderr[-200:]
        yield "pytest -m gpu", last, done.returncode == 0 and (self.tiny or "passed" in last)

    def bandwidths(self) -> Rows:
        """Ceilings: memory, matrix products in bfloat16, and copies between host and device."""
        import torch

        size, side = (2**24, 512) if self.tiny else (2**32, 8192)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target, host = torch.empty_like(source), torch.empty(size // 4, dtype=torch.uint8, pin_memory=not self.tiny)
        matrix = torch.randn(side, side, dtype=torch.bfloat16, device=self.device)
        product = torch.empty_like(matrix)
        ways: dict[str, tuple[Callable[[], object], float, str]] = {
            "memory": (lambda: target.copy_(source), 2 * size, "GB/s read and written, device to device"),
            "matrix": (lambda: torch.matmul(matrix, matrix, out=product), 2.0 * side**3, "GFLOP/s in bfloat16"),
            "to host": (lambda: host.copy_(source[: size // 4]), size / 4, "GB/s, pinned"),
            "to device": (lambda: source[: size // 4].copy_(host), size / 4, "GB/s, pinned"),
        }
        for name, (work, amount, unit) in ways.items():
            self.ceilings[name] = amount / min(self._timed(work) for _ in range(5))
            yield f"ceiling: {name}", f"{self.ceilings[name] / 1e9:,.1f} {unit}", True

    def tokens(self) -> Rows:
        """Greedy tokens here and on the CPU's own executor. Float32 must agree but for near ties; bfloat16 is told."""
        from maitred import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2)
        prompts = [[3 + (37 * i + 11 * j) % 250 for j in range(24)] for i in range(8)]
        for name, model in (("built-in", None), ("Llama 0.5B", self.llama())):
            for dtype in ("float32", "bfloat16"):
                with self.llm(model, dtype=dtype, max_num_seqs=8) as llm:
                    here = [output.outputs[0] for output in llm.generate(prompts, greedy)]
                with self.llm(model, executor="native", device="cpu", dtype=dtype, weight_cache="off") as llm:
                    there = [output.outputs[0] for output in llm.generate(prompts, greedy)]
                num_equal, off, margin = 0, 0.0, 0.0
                for one, two in zip(here, there, strict=True):
                    pairs = list(zip(one.token_ids, two.token_ids, one.logprobs, two.logprobs, strict=True))
                    first = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
                    num_equal += first
                    off = max([off, *(abs(a[x].logprob - b[y].logprob) for x, y, a, b in pairs[:first])])
                    if first < len(pairs):  # by how much the CPU preferred its token
                        best = sorted(entry.logprob for entry in pairs[first][3].values())
                        margin = max(margin, best[-1] - best[-2])
                good = dtype == "bfloat16" or (off < 1e-3 and margin < 1e-3)
                told = f"{num_equal} of {32 * len(prompts)} equal before the first that differs; "
                told += f"log-probabilities differ by {off:.1e}, margins where tokens part {margin:.1e}"
                yield f"greedy, {name}, {dtype}", told, good

    def rates(self) -> Rows:
        """Prefill and decode against what bytes and products allow."""
        from maitred import SamplingParams

        lengths = (16, 4) if self.tiny else (512, 64)
        for block_size in (16, 256):
            settings = {"dtype": "bfloat16", "max_num_seqs": 256, "max_model_len": 1024, "enable_prefix_caching": False}
            with self.llm(self.llama(), block_size=block_size, max_num_batched_tokens=8192, **settings) as llm:
                spec = llm._open().spec
                yield f"block size {block_size}", llm._open().core._executor._attention.__class__.__name__, True
                llm.generate([[5] * 300], SamplingParams(max_tokens=8, ignore_eos=True))  # warm
                kv_bytes = llm.memory_plan.bytes_per_block / block_size
                weights = spec.num_parameters() - spec.vocab_size * spec.hidden_size  # rows of the embedding are few
                for count in (1, 32, 256):
                    if time.monotonic() - self.began_at > SLOWEST_RATES_S:
                        yield f"{count} requests", "left out, the time is up", False
                        continue
                    prompts = [[3 + (i * 7 + j) % 250 for j in range(lengths[0])] for i in range(count)]
                    prefill_s = self._generate_s(llm, prompts, 1)
                    decode_s = (self._generate_s(llm, prompts, 1 + lengths[1]) - prefill_s) / lengths[1]
                    bound_s = 2 * weights * count * lengths[0] / self.ceilings["matrix"]
                    rate = count * lengths[0] / prefill_s
                    yield (
                        f"prefill, {count} requests",
                        f"{rate:,.0f} tokens/s, {bound_s / prefill_s:.1%} of matrix",
                        True,
                    )
                    moved = weights * 2 + count * (lengths[0] + lengths[1] / 2) * kv_bytes
                    bound_s = max(moved / self.ceilings["memory"], 2 * weights * count / self.ceilings["matrix"])
                    told = f"{count / decode_s:,.0f} tokens/s, {decode_s * 1e3:.2f} ms a step, {bound_s / decode_s:.1%}"
                    yield f"decode, {count} requests", f"{told} of memory or matrix", True

    def copies(self) -> Rows:
        """KV to the host and back: how fast, and that no token changes."""
        from maitred import SamplingParams

        settings = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
        prompts = [[5 + (i * 31 + j * 7) % 300 for j in range(200)] for i in range(12)]
        sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=100, ignore_eos=True)
        with self.llm(None, **settings) as llm:
            expected = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
            kv_bytes = 60 * llm.memory_plan.bytes_per_block
        with self.llm(self.llama(), dtype="bfloat16", max_model_len=512, swap_memory_bytes=2**28) as llm:
            speed = llm._open().core._executor.measure_swap()
            for way, found in (("host", speed.out_bytes_per_s), ("device", speed.in_bytes_per_s)):
                share = found / self.ceilings[f"to {way}"]
                yield f"swap to {way}", f"{found / 1e9:.1f} GB/s, {share:.0%} of a pinned copy", True
        small = {"kv_cache_memory_bytes": kv_bytes, **settings}
        with self.llm(None, swap_memory_bytes=2**26, **small) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
            stats = llm._open().core.stats
            told = f"{stats.num_preemptions} preemptions, {stats.num_swapped_out_blocks} blocks swapped"
            yield "swap", f"{told}; tokens {'equal' if found == expected else 'DIFFER'}", found == expected
        with self.llm(None, kv_host_bytes=2**28, **small) as llm:
            for prompt in prompts:
                llm.generate([prompt], sampling)
            again = [llm.generate([prompt], sampling)[0] for prompt in prompts]
            equal = [output.outputs[0].token_ids for output in again] == expected
            cached = sum(output.num_cached_tokens for output in again)
            yield "host tier", f"{cached} of 2,400 tokens found; tokens {'equal' if equal else 'DIFFER'}", equal

    def llama(self) -> str:
        """A folder of a random Llama of 0.5 B parameters; tiny in a rehearsal."""
        from tests.model.checkpoints import make_checkpoint

        folder = self.folder / "llama"
        if not folder.exists():
            layers, hidden, inner, vocab = (2, 64, 128, 2048) if self.tiny else (28, 1024, 4096, 32768)
            shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
            heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256), "head_dim": 64}
            make_checkpoint("llama", folder, **shape, **heads, vocab_size=vocab, max_position_embeddings=2048)
        return str(folder)

    def _timed(self, work: Callable[[], object]) -> float:
        import torch

        wait = (lambda: None) if self.tiny else torch.cuda.synchronize
        work()
        wait()
        began = time.perf_counter()
        work()
        wait()
        return time.perf_counter() - began

    def _generate_s(self, llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
        from maitred import SamplingParams

        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
        return time.perf_counter() - began


def measure(device: str, file: Path) -> int:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        check = Check(device, Path(folder))

        def tell(section: str, what: str, found: str, good: bool) -> None:
            rows.append({"section": section, "what": what, "found": found, "good": good})
            print(f"{time.monotonic() - check.began_at:6.1f} s  {'' if good else 'NOT '}ok  {what}: {found}")
            file.write_text(json.dumps(rows, indent=1))

        try:
            for section in (check.machine, check.tests, check.bandwidths, check.tokens, check.copies, check.rates):
                try:
                    for row in section():
                        tell(section.__name__, *row)
                except Exception as error:
                    traceback.print_exc()
                    tell(section.__name__, section.__name__, f"{type(error).__name__}: {error}"[:300], False)
                    if section == check.machine:
                        break
        finally:
            print("\n| what | found | |\n|---|---|---|")
            for row in rows:
                print(f"| {row['what']} | {row['found']} | {'ok' if row['good'] else '**not ok**'} |")
    return 0 if all(row["good"] for row in rows) else 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--unpack", nargs=2, type=Path, metavar=("WHEELS", "SITE"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    args = parser.parse_args()
    sys.exit(unpack(*args.unpack) if args.unpack else measure(args.device, args.json))


if __name__ == "__main__":
    main()
