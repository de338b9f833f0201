"""Workers on hosts that are unlike: KV of other blocks and executors is converted, of other bits taken where asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maitred.api.http.fleet_token import FleetToken
from maitred.cli.serve.kv_listening import share_of
from maitred.config import CacheConfig
from maitred.errors import ConfigError
from tests.reliability.test_hosts import GREEDY, all_handovers, ask, names_of, workers
from tests.reliability.test_workers import STORY
from tests.route.test_end_to_end import RealFleet, real_fleet
from tests.waiting import until

SAME = ("--kv-listen", "127.0.0.1:0", "--kv-dtype", "float32", "--max-model-len", "2048")
MIXED = (*SAME, "--kv-compat", "mixed", "--resume", "always")


@pytest.fixture(scope="module", params=[("--dtype", "float32"), ("--executor", "torch", "--device", "cpu")])
def unlike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    flags = [
        ("--role", "prefill", "--dtype", "int8", "--block-size", "32", *MIXED),
        ("--role", "decode", *request.param, *MIXED),
    ]
    router = ("--handover", "always", "--role-switching", "off")
    with real_fleet(tmp_path_factory.mktemp("unlike"), flags, *router) as fleet:
        until(lambda: len(workers(fleet)) == 2)
        yield fleet


@pytest.mark.parametrize("stream", [True, False])
def test_mixed_kv_goes_from_an_int8_worker_to_one_of_float32_or_pytorch(unlike: RealFleet, stream: bool):
    body = GREEDY | {"prompt": f"Unlike {stream}. {STORY}"}
    before = all_handovers(unlike)["mixed"]
    told, headers = ask(unlike.router.url, body, stream=stream)
    until(lambda: all_handovers(unlike)["mixed"] == before + 1)
    assert told[0]
    assert headers["x-maitred-replica"] in names_of(unlike, "prefill" if stream else "decode")


def test_blocks_of_another_size_give_the_answers_of_a_lone_engine(tmp_path: Path):
    flags = [("--role", role, "--block-size", size, *SAME) for role, size in (("prefill", "64"), ("decode", "16"))]
    with real_fleet(tmp_path, flags, "--handover", "always", "--role-switching", "off") as fleet:
        until(lambda: len(workers(fleet)) == 2)
        alone = [ask(replica.url, GREEDY, stream=False)[0] for replica in fleet.replicas]
        assert [ask(fleet.router.url, GREEDY, stream=stream)[0] for stream in (True, False)] == alone
        moved = GREEDY | {"prompt": "Moved. " + STORY}
        told = ask(fleet.router.url, moved, stream=True)[0]
        until(lambda: all_handovers(fleet)["moved"])
        assert told == ask(fleet.replicas[0].url, moved, stream=False)[0]


def test_mixed_workers_that_could_not_go_on_with_streams_are_refused():
    with pytest.raises(ConfigError, match="--resume always"):
        share_of("127.0.0.1:0", CacheConfig(kv_compat="mixed"), FleetToken(b"0123456789abcdef0123456789abcdef"))
