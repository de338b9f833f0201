"""Workers on hosts that are unlike: KV in blocks of another size is converted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.test_end_to_end import real_fleet
from tests.reliability.test_hosts import GREEDY, LONG, all_handovers, ask, workers
from tests.reliability.test_workers import STORY
from tests.waiting import until

SAME = ("--kv-listen", "127.0.0.1:0", "--kv-dtype", "float32", "--max-model-len", "2048")


@pytest.mark.soak
def test_blocks_of_another_size_give_the_answers_of_a_lone_engine(tmp_path: Path):
    flags = [("--role", role, "--block-size", size, *SAME) for role, size in (("prefill", "64"), ("decode", "16"))]
    with real_fleet(tmp_path, flags, "--handover", "always") as fleet:
        until(lambda: len(workers(fleet)) == 2)
        alone = [ask(replica.url, GREEDY, stream=False)[0] for replica in fleet.replicas]
        assert [ask(fleet.router.url, GREEDY, stream=stream)[0] for stream in (True, False)] == alone
        moved = LONG | {"prompt": "Moved. " + STORY}
        told = ask(fleet.router.url, moved, stream=True)[0]
        until(lambda: all_handovers(fleet)["moved"])
        assert told == ask(fleet.replicas[0].url, moved, stream=False)[0]
