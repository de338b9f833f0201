"""`serve --capture`: whose answers are kept, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.api.http.fleet_headers import vouching
from maitred.cli.main import main
from maitred.storage.capture import Capture, read_captured
from maitred.tenancy.caller import Caller
from maitred.tenancy.quota import TenantQuota
from maitred.tenancy.tenant import Tenant
from tests.api.conftest import MESSAGES
from tests.api.test_tenants import get, post
from tests.fakes_api import EOS, FakeReplica, FakeTenants, running_server, table_of
from tests.waiting import until

TENANTS: dict[str, dict[str, Any]] = {"mute": {}, "asked": {"capture": "asked"}, "open": {"capture": "always"}}
HELLO = [*b"Hello, world!", EOS]
PROMPT = [*b"<user>hi", EOS, *b"<assistant>"]


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_captured(folder).splitlines()]


def test_only_what_tenant_and_request_allow_is_kept_whole_and_streamed_alike(tmp_path: Path):
    capture, folder = Capture(tmp_path / "c", 2**20), tmp_path / "c"
    with running_server(tenants=FakeTenants(table_of({**TENANTS, "boss": {}})), capture=capture) as server:
        for tenant in ("mute", "asked", "open"):
            for store in (None, False, True):
                for stream in (False, True):
                    assert post(server, tenant, store=store, stream=stream).status_code == 200
        until(lambda: capture.counts["written"] == 6)
        assert post(server, "open", n=2, max_tokens=3).status_code == 200
        until(lambda: capture.counts["written"] == 8)
        page = get(server, "boss", "/metrics").text
    capture.close()
    lines = kept(folder)
    assert [line["tenant"] for line in lines] == ["asked"] * 2 + ["open"] * 6
    assert [line["token_ids"] for line in lines[:6]] == [[*PROMPT, *HELLO]] * 6, "the token that ends it is learnt too"
    assert [line["token_ids"] for line in lines[6:]] == [[*PROMPT, *HELLO[:3]]] * 2
    assert {(line["num_prompt_tokens"], line["model"]) for line in lines} == {(len(PROMPT), "tiny")}
    assert 'maitred_captured_answers_total{outcome="written"} 8.0' in page
    assert f"maitred_capture_bytes {len(read_captured(folder)):.1f}" in page


def test_answers_that_failed_or_were_not_taken_and_prompts_alone_are_not_kept(tmp_path: Path):
    capture = Capture(tmp_path / "c", 2**20)
    tenants = FakeTenants(table_of(TENANTS))
    with running_server(FakeReplica(fail_after=4), tenants=tenants, capture=capture) as server:
        assert [post(server, "open", stream=stream).status_code for stream in (False, True)] == [500, 200]
    with running_server(tenants=tenants, capture=capture) as server:
        score = {"prompt": "hi", "echo": True, "max_tokens": 0, "logprobs": 1}
        key = {"authorization": "Bearer open"}
        assert httpx.post(f"{server.url}/v1/completions", json=score, headers=key).status_code == 200
    capture.close()
    assert kept(tmp_path / "c") == []


def test_a_router_vouches_for_what_its_tenant_allows(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    capture = Capture(tmp_path / "c", 2**20)
    with running_server(fleet_token_file=str(token), capture=capture) as server:
        for allowed in ("never", "asked", "always"):
            tenant = Tenant(name=allowed, capture=allowed)
            told = vouching(Caller(tenant, TenantQuota(allowed, tenant.limits)), salt="s", priority=1)
            headers = {name.decode(): value.decode() for name, value in told}
            headers |= {"x-maitred-fleet-token": token.read_text()}
            for more in ({}, {"x-maitred-prompt-only": "1"}):
                url = f"{server.url}/v1/chat/completions"
                assert httpx.post(url, json={"messages": MESSAGES}, headers=headers | more).status_code == 200
    capture.close()
    assert [line["tenant"] for line in kept(tmp_path / "c")] == ["always"]


def test_capture_without_tenants_is_refused_with_the_line_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--port", "0", "--capture", str(tmp_path / "c")]) == 1
    assert "add --tenants FILE" in capsys.readouterr().err
