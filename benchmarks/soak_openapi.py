"""schemathesis in long: a thousand requests for each operation of the OpenAPI document, new ones in each run.

    python benchmarks/soak_openapi.py [--examples 1000] [--seed N]

All checks, good and bad requests, and sequences of them, against the served built-in model. A request that takes over
ten seconds counts as hung. Prints what schemathesis found, and how often each route answered what; the exit code is 1
when it found anything, or when the engine died.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx

sys.path.insert(0, ".")
from tests.reliability.openapi import documented_server, num_restarts, run_schemathesis

HANGS_S = 10


def answers(url: str) -> Counter[str]:
    """How many requests had which outcome, by route."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    counted = (line for line in lines if line.startswith("maitred_http_requests_total{"))
    return Counter({line[line.index("{") : line.index("}") + 1]: int(float(line.split()[-1])) for line in counted})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=1000, help="for each operation")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the examples")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, documented_server(Path(folder)) as server:
        flags = ("--max-examples", str(chosen.examples), "--seed", str(chosen.seed), "--request-timeout", str(HANGS_S))
        ran = run_schemathesis(server.url, Path(folder), *flags)
        died, told = num_restarts(server.url), answers(server.url)
    sys.stdout.write(ran.stdout)
    for labels, count in told.most_common():
        sys.stdout.write(f"{count:7d} {labels}\n")
    sys.stdout.write(f"{sum(told.values())} requests, {died:g} deaths of the engine, seed {chosen.seed}\n")
    return 0 if ran.returncode == 0 and died == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
