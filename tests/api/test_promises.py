"""Objectives of `serve --slo`: counted as `bench serve --slo` judges the same run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.core.objectives import broken_by, met, new_pace, percentile
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from tests.cli.running import maitred_thread
from tests.fakes_api import FakeReplica, running_server

SLOS = {"ttft": 2.0, "itl": 10.0, "tpot": 10.0, "e2e": 20.0}
LOAD = "--endpoint chat --num-requests 40 --concurrency 40 --input-len 8 --output-len 8"
WORDS = [word for name, bound in SLOS.items() for word in ("--slo", f"{name}:{bound}s")]


class Uneven(FakeReplica):
    """Of four requests one has its first token too late, and one fails."""

    async def _progress(self, request: RequestSpec) -> AsyncIterator[RequestProgress]:
        number = self.submitted.index(request)
        if number % 4 == 1:
            await asyncio.sleep(1.5 * SLOS["ttft"])
        if number % 4 == 3:
            yield RequestProgress(request.request_id, finish_reason=FinishReason.ERROR, error="logits are NaN")
            return
        async for progress in super()._progress(request):
            yield progress


def counted(url: str) -> dict[tuple[str, bool], float]:
    """By objective, and whether it was met."""
    page = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = next(family for family in page if family.name == "maitred_requests_in_objective").samples
    return {(sample.labels["objective"], sample.labels["met"] == "true"): sample.value for sample in samples}


async def test_the_server_counts_as_its_load_test_does(tmp_path: Path):
    path = tmp_path / "run.json"
    with running_server(Uneven(), slo=tuple(f"{name}:{bound}s" for name, bound in SLOS.items())) as server:
        words = ("bench", "serve", "--url", server.url, "--json", str(path), *LOAD.split(), *WORDS)
        assert await maitred_thread(*words) == 0
        counts = counted(server.url)
    result = json.loads(path.read_text())["result"]
    assert 0 < result["num_good"] < 40
    assert sum(counts["all", was_met] for was_met in (True, False)) == 40
    assert counts["all", True] / 40 == pytest.approx(result["num_good"] / 40, abs=0.02)
    assert counts["ttft", False] == counts["itl", False] + 10  # who failed met none; who was late has other merits


def test_what_the_client_did_wrong_counts_for_nobody():
    with running_server(FakeReplica(), slo=("ttft:10s",)) as server:
        for body in ({"model": "tiny"}, {"model": "nobody's", "prompt": "x"}):
            assert httpx.post(f"{server.url}/v1/completions", json=body).is_client_error
        assert counted(server.url) == {}
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"}).raise_for_status()
        assert counted(server.url) == {
            ("ttft", True): 1, ("ttft", False): 0, ("all", True): 1, ("all", False): 0
        }  # fmt: skip


def test_an_objective_bounds_what_the_load_test_measures():
    pace = new_pace(keeps_gaps=True)
    for now, num_tokens in ((10.5, 2), (10.6, 1), (10.9, 3)):
        pace.came(now, num_tokens)
    gaps = [0.1, 0.1, 0.1, 0.1]
    assert pace.itl_p99_s() == pytest.approx(percentile(gaps, 99))
    assert pace.tpot_s() == pytest.approx(0.1)
    bounds = {"ttft": 0.4, "itl": 0.11, "tpot": 0.09, "e2e": 1.0}
    assert met(bounds, [pace], 10.0) == {"ttft": False, "itl": True, "tpot": False, "e2e": True}


@pytest.mark.parametrize(("gone_after_s", "objectives"), [(0.5, set()), (1.5, {"ttft"}), (9.0, {"ttft", "e2e"})])
def test_who_waited_longer_than_promised_and_left_was_not_served(gone_after_s: float, objectives: set[str]):
    for paces in ([], [new_pace(keeps_gaps=False)]):
        broken = broken_by({"ttft": 1.0, "e2e": 5.0}, paces, 0.0, gone_after_s)
        assert {name for name, is_broken in broken.items() if is_broken} == objectives


def test_an_objective_that_is_none_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="ttft:200ms"):
        ServerConfig(slo=("first:1s",))
