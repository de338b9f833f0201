"""`maitred keys`, and what `serve` makes of a tenants file."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

from maitred.cli import serve
from maitred.cli.main import main
from maitred.cli.serve import TenancyConfig, open_tenancy
from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.storage.key_files import read_tenant_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants:\n  acme:\n  other:\n")
    return path


def test_a_made_key_is_printed_once_and_alone(file, capsys):
    assert main(["keys", "create", "--tenants", str(file), "--tenant", "acme", "--name", "cat's laptop"]) == 0
    out, err = capsys.readouterr()
    secret = out.removesuffix("\n")
    key = read_tenant_file(file).keys.find(secret.encode())
    assert (key.tenant, key.name, key.admin) == ("acme", "cat's laptop", False)
    assert len(secret) >= 43
    assert secret not in err + file.read_text()
    assert key.id in err


def test_a_secret_of_ones_own_comes_by_standard_input(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("my own secret\n"))
    assert main(["keys", "hash", "--tenants", str(file), "--tenant", "other", "--admin"]) == 0
    assert read_tenant_file(file).keys.find(b"my own secret").admin
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["keys", "hash", "--tenants", str(file), "--tenant", "other"]) == 2


def test_keys_are_listed_without_secrets_and_revoked_by_id(file, capsys):
    for tenant in ("acme", "other"):
        main(["keys", "create", "--tenants", str(file), "--tenant", tenant])
    secrets = capsys.readouterr().out.split()
    assert main(["keys", "list", "--tenants", str(file)]) == 0
    listed = capsys.readouterr().out
    assert not any(secret in listed for secret in secrets)
    assert all(secret[:8] in listed for secret in secrets)
    assert main(["keys", "list", "--tenants", str(file), "--tenant", "acme"]) == 0
    key_id = capsys.readouterr().out.splitlines()[1].split()[0]
    assert main(["keys", "revoke", "--tenants", str(file), "--key", key_id]) == 0
    assert [key.tenant for key in read_tenant_file(file).keys.keys] == ["other"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["creat"], 2, "did you mean create?"),
        (["create"], 2, "keys create needs --tenant NAME"),
        (["revoke"], 2, "needs --key ID"),
        ([], 2, "create|list|hash|revoke is required"),
        (["list", "--tenant", "acm"], 1, "did you mean acme?"),
        (["create", "--tenant", "acm"], 1, "has no tenant 'acm'"),
        (["revoke", "--key", "x"], 1, "has no key 'x'"),
        (["list", "--tenants", "nowhere.yaml"], 1, "nowhere.yaml"),
    ],
)
def test_a_slip_is_one_line(file, capsys, words, code, told):
    where = [] if "--tenants" in words else ["--tenants", str(file)]
    assert main(["keys", *words, *where]) == code
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_where_there_are_tenants_the_policy_heeds_their_tiers_unless_one_was_chosen(file):
    def policy(*words: str) -> str:
        return serve.served_config(serve.COMMAND.parse(list(words), environ={})).scheduler.policy

    assert policy() == "fcfs"
    assert policy("--tenants", str(file)) == "interactive"
    assert policy("--tenants", str(file), "--policy", "fcfs") == "fcfs"


def test_a_hangup_reads_the_file_again_and_the_end_gives_the_signal_back(file):
    before = signal.getsignal(signal.SIGHUP)
    with open_tenancy(TenancyConfig(tenants=str(file)), ServerConfig()) as (tenants, ledger):
        assert ledger is None
        assert set(tenants.table.tenants) == {"acme", "other"}
        assert signal.getsignal(signal.SIGHUP) is not before
    assert signal.getsignal(signal.SIGHUP) is before
    with open_tenancy(TenancyConfig(), ServerConfig()) as files:
        assert files == (None, None)


def test_a_budget_needs_a_ledger_and_tenants_leave_no_side_door(file, tmp_path):
    file.write_text("tenants: {acme: {token_budget: 9}}")
    with (
        pytest.raises(ConfigError, match="add --ledger FILE"),
        open_tenancy(TenancyConfig(tenants=str(file)), ServerConfig()),
    ):
        pass
    config = TenancyConfig(tenants=str(file), ledger=str(tmp_path / "l.sqlite"))
    with open_tenancy(config, ServerConfig()) as (_, ledger):
        assert ledger.spent_tokens() == {}
    with pytest.raises(ConfigError, match="exclude each other"), open_tenancy(config, ServerConfig(api_keys=("x",))):
        pass
