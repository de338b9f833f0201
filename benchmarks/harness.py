"""What the benchmarks share: servers in processes of their own, load, ways in turn, their ratios, random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from peers.shapes import SHAPES

from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.model.families import spec_from_config
from maitred.model.weight_map import weight_map

Figures = dict[str, float]
Found = dict[str, list[Figures]]  # by way, a round each
QWEN3_06B: dict[str, Any] = SHAPES["qwen3-0.6b"] | {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


# ---- servers and their load


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        return sum(sum(each.cpu_times()[:2]) for each in (self.process, *self.process.children(recursive=True)))


@contextmanager
def served(*words: str, command: str = "serve") -> Iterator[Server]:
    """`maitred serve WORDS` (or another command) on a free port, once it is ready."""
    whole = (sys.executable, "-P", "-m", "maitred", command, *words, "--host", "127.0.0.1", "--port", "0")
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r" on (http://127\.0\.0\.1:\d+)", line):
                    break
            else:
                raise SystemExit(f"the server did not start:\n{''.join(said)}")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Server(found[1], psutil.Process(process.pid))
        finally:
            process.terminate()


def begin_load(kind: str, url: str, *words: object) -> subprocess.Popen[str]:
    """`maitred bench serve` or `bench infer` under way, which ends by printing JSON."""
    whole = (sys.executable, "-P", "-m", "maitred", "bench", kind, "--url", url, *map(str, words), "--json")
    return subprocess.Popen(
        [*whole, "-"] if kind == "serve" else whole, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def end_load(load: subprocess.Popen[str]) -> dict[str, Any]:
    """Figures of the load; the server's own of a language model."""
    out, _ = load.communicate()
    if load.returncode:
        raise SystemExit(f"the load ended with {load.returncode}: {load.args}")
    told: dict[str, Any] = json.loads(out)
    return told.get("result", told)


# ---- ways in turn


def in_turn(ways: Mapping[str, Callable[[], Figures]], rounds: int) -> Found:
    """`rounds` runs of each way; every second round goes backwards, so that the machine's moods meet all ways alike."""
    found: Found = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            found[name].append(ways[name]())
    return found


def print_table(title: str, found: Found) -> None:
    """Medians of each figure, and of its ratios to the first way."""
    print(f"\n{title}\n{'':26}" + "".join(f"{name:>18}{'ratio':>8}" for name in found))
    for figure in next(iter(found.values()))[0]:
        cells = []
        for rounds in found.values():
            first = found[next(iter(found))]
            each = [own[figure] / base[figure] for own, base in zip(rounds, first, strict=True) if base[figure]]
            ratio = f"{statistics.median(each):8.3f}" if each else f"{'-':>8}"
            cells.append(f"{statistics.median(run[figure] for run in rounds):18,.2f}{ratio}")
        print(f"{figure:26}" + "".join(cells), flush=True)


def joules() -> float:
    """Of the processor's packages so far, as powercap counts them; 0 where that cannot be read."""
    counters = Path("/sys/class/powercap").glob("intel-rapl:?/energy_uj")
    return sum(int(each.read_text()) for each in counters if os.access(each, os.R_OK)) / 1e6


def write_section(page: Path, section: str, text: str) -> None:
    """Between `<!-- section: begin -->` and its end in a page of docs/; both are added where they are missing."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    whole = page.read_text(encoding="utf-8")
    if begin not in whole:
        whole = f"{whole.rstrip()}\n\n{begin}\n{end}\n"
    before, rest = whole.split(begin)
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


# ---- random weights


def make_checkpoint(folder: Path, config: Mapping[str, Any] = QWEN3_06B) -> Path:
    """Random bfloat16 weights of that shape, with the built-in model's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_FOLDER / name, folder)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    header, offset = {}, 0
    sources = weight_map(spec_from_config(dict(config)), AnyName())
    shapes = {source.tensor: source.shape for source in sources}
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            values = rng.standard_normal(int(np.prod(shape)), dtype=np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return folder


class AnyName(dict[str, Any]):
    """As if the checkpoint had every tensor that is asked for."""

    def __contains__(self, name: object) -> bool:
        return True
