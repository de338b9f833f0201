"""Whether the time to a first token tells a tenant what another one has asked (S5): a Welch test over one real server.

    python benchmarks/soak_tenants.py [--each 200] [--share-cache]

Each trial has a new prompt, which `b` asks and is timed. Just before, a prompt of the same kind was asked and answered:
another one by `a` (cold), the same one by `a` (other's), or the same one by `b` (own). The three come in random order,
so that the machine's moods meet all of them, and logarithms are compared, because its other work multiplies times. The
exit code is 1 when what the other tenant has cached differs from cold (p < 0.001), and when what `b` has cached itself
does not clearly differ. `--share-cache` puts both into one `shared_cache_group`, to see the test fail.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, ".")
from tests.api.test_tenants_end_to_end import MODEL, new_key
from tests.conftest import start_server

WORDS = ("the", "soup", "is", "on", "a", "table", "by", "window", "and", "nobody", "waits", "long", "tonight")
KINDS = ("cold", "other's", "own")
P_LEAK = 0.001
T_SEEN = 10.0  # of what must be seen


class Welch(NamedTuple):
    """Welch 1947, Biometrika 34: unequal variances; degrees of freedom after Satterthwaite."""

    difference: float
    error: float
    freedom: float

    @property
    def t(self) -> float:
        return self.difference / self.error

    @property
    def p(self) -> float:
        """Two-sided. With t = sqrt(freedom) tan(x), Student's density is a power of cos(x): Simpson's rule on that."""
        begin = math.atan(abs(self.t) / math.sqrt(self.freedom))
        end = min(math.pi / 2, begin + 40 / math.sqrt(self.freedom))  # there is nothing beyond
        width = (end - begin) / 2000
        heights = [math.cos(begin + width * i) ** (self.freedom - 1) for i in range(2001)]
        area = (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])) * width / 3
        scale = math.lgamma((self.freedom + 1) / 2) - math.lgamma(self.freedom / 2) - math.log(math.pi) / 2
        return min(1.0, 2 * area * math.exp(scale))


def welch(ones: list[float], others: list[float]) -> Welch:
    parts = [statistics.variance(each) / len(each) for each in (ones, others)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (ones, others), strict=True))
    return Welch(statistics.fmean(ones) - statistics.fmean(others), math.sqrt(sum(parts)), freedom)


@dataclass
class Tenant:
    """One who asks, on a connection that stays."""

    key: str
    web: HTTPConnection
    num_cached: list[int] = field(default_factory=list)  # tokens, of the requests so far

    def ask(self, prompt: str) -> float:
        """Seconds to the first token."""
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        body = json.dumps({**fields, "stream_options": {"include_usage": True}})
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        began = time.perf_counter()
        self.web.request("POST", "/v1/completions", body, headers)
        answer = self.web.getresponse()
        while not answer.readline().startswith(b"data: "):
            if answer.status != 200:
                raise SystemExit(f"status {answer.status}: {answer.read().decode()}")
        took_s = time.perf_counter() - began
        usage = next(line for line in answer.read().splitlines() if b'"usage":{' in line)
        told = json.loads(usage.removeprefix(b"data: "))["usage"]
        self.num_cached.append(told["prompt_tokens_details"]["cached_tokens"])
        return took_s


def measure(a: Tenant, b: Tenant, each: int, num_words: int, seed: int) -> dict[str, list[float]]:
    """Logarithms of the milliseconds to the first token, by kind."""
    chooser = random.Random(seed)
    log_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: dict[str, set[bool]] = {kind: set() for kind in KINDS}
    for tenant in (a, b, a, b):  # what is slow the first time
        tenant.ask(" ".join(chooser.choices(WORDS, k=num_words)))
    for kind in chooser.sample(KINDS * each, len(KINDS) * each):
        asked, another = (" ".join(chooser.choices(WORDS, k=num_words)) for _ in range(2))
        (b if kind == "own" else a).ask(another if kind == "cold" else asked)
        log_ms[kind].append(math.log(b.ask(asked) * 1000))
        cached[kind].add(b.num_cached[-1] > 0)
    for kind, logs in log_ms.items():
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        told = "all" if cached[kind] == {True} else "some" if True in cached[kind] else "none"
        mean_ms = math.exp(statistics.fmean(logs))
        say(f"     {kind:8} {mean_ms:8.3f} ms (geometric mean), standard error {error:.1%}; {told} said to be cached")
    return log_ms


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def verdict(name: str, found: Welch, good: bool) -> bool:
    figures = f"{math.expm1(found.difference):+.1%}, standard error {found.error:.1%}"
    say(f"{'ok  ' if good else 'BAD '} {name}: {figures}, t = {found.t:.2f}, {found.freedom:.0f} df, p = {found.p:.2g}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=200, help="trials of each kind")
    parser.add_argument("--words", type=int, default=600, help="of a prompt")
    parser.add_argument("--share-cache", action="store_true")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6)
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.yaml"
        limits = "{shared_cache_group: g}" if arguments.share_cache else ""
        tenants.write_text(f"tenants:\n  a: {limits}\n  b: {limits}\n")
        keys = [new_key(tenants, tenant) for tenant in "ab"]
        server = start_server("--tenants", str(tenants))
        try:
            address = server.url.removeprefix("http://")
            a, b = (Tenant(key, HTTPConnection(address, timeout=60)) for key in keys)
            say(f"{arguments.each} trials of each kind, {arguments.words} words, seed {seed}")
            log_ms = measure(a, b, arguments.each, arguments.words, seed)
        finally:
            server.stop()
    leak = welch(log_ms["other's"], log_ms["cold"])
    seen = welch(log_ms["own"], log_ms["cold"])
    good = verdict("what the other tenant has cached, against cold", leak, leak.p >= P_LEAK)
    return 0 if verdict("what it has cached itself, against cold", seen, seen.t < -T_SEEN) and good else 1


if __name__ == "__main__":
    sys.exit(main())
