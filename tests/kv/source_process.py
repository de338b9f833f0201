"""A process with a source of random blocks.

It prints its addresses, offers the lease `prompt` with the first blocks readable, and for each line on stdin
lets two more be read.
"""

from __future__ import annotations

import sys

from maitred.kv.leases import Readable
from tests.kv.worlds import Pool, make_layout, make_source

SEED, FIRST, COUNT = 9, 2, 12


def blocks() -> list[int]:
    return list(range(COUNT))


def main() -> None:
    pool = Pool(make_layout(), seed=SEED)
    source = make_source(pool, lease_s=600.0)
    source.offers.offer("prompt", COUNT, blocks(), Readable(FIRST))
    addresses = [source.listen_tcp("127.0.0.1", 0), source.listen_shm()]
    if "nixl" in sys.argv:
        addresses.append(source.listen_nixl("127.0.0.1", 0))
    say(" ".join(addresses))
    readable = FIRST
    for _ in sys.stdin:
        readable += 2
        source.offers.grow("prompt", Readable(readable))
        if readable > COUNT:
            say(f"torch: {'torch' in sys.modules}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
