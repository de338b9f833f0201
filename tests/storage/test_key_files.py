"""tenants.yaml: read with good errors, watched, and edited line by line without losing what its author wrote."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maitred.core.errors import ConfigError
from maitred.storage.key_files import TenantFile, add_key, make_key, read_tenant_file, remove_key
from tests.waiting import until

FILE = """\
# who may ask
tenants:
  acme:   # pays
    weight: 2
    keys:
      # the first
      - {id: key_a, sha256: "AAAA"}   # laptop
      - id: key_b
        sha256: "BBBB"
  bare:
  fields:
    tier: flex   # cheap
  flow: {weight: 3}
""".replace("AAAA", "a" * 64).replace("BBBB", "b" * 64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tenants.yaml"
    file.write_text(FILE)
    return file


@pytest.mark.parametrize("tenant", ["acme", "bare", "fields"])
def test_a_new_key_is_one_line_more_and_opens(path, tenant):
    made = make_key(tenant, name='the "laptop": #1', admin=True)
    add_key(path, made.key)
    found = read_tenant_file(path).keys.find(made.secret.encode())
    assert found == made.key
    lines = path.read_text().splitlines()
    assert all(line in lines for line in FILE.splitlines())
    assert made.secret not in path.read_text()
    assert made.secret.startswith(found.prefix)
    assert path.stat().st_mode & 0o777 == 0o600
    remove_key(path, made.key.id)
    assert read_tenant_file(path).keys.find(made.secret.encode()) is None
    if tenant == "acme":
        assert path.read_text() == FILE


def test_keys_come_into_empty_lists_forms_without_room_and_merged_tenants(path):
    path.write_text(FILE.replace("  bare:\n", "  bare:\n    keys: []   # none yet\n    tier: flex\n"))
    made = make_key("bare")
    add_key(path, made.key)
    assert read_tenant_file(path).keys.find(made.secret.encode()) == made.key
    assert {"# who may ask", "    tier: flex"} <= set(path.read_text().splitlines())
    assert "# none yet" in path.read_text()
    before = read_tenant_file(path)
    made = make_key("flow")
    add_key(path, made.key)
    after = read_tenant_file(path)
    assert after.tenants == before.tenants
    assert set(after.keys.keys) == {*before.keys.keys, made.key}
    path.write_text("tenants:\n  bare: &bare {}\n  <<: {acme: *bare}\n")
    made = make_key("acme")
    add_key(path, made.key)
    assert read_tenant_file(path).keys.find(made.secret.encode()) == made.key


@pytest.mark.parametrize("key_id", ["key_a", "key_b"])
def test_a_revoked_key_is_gone_and_the_others_stay(path, key_id):
    remove_key(path, key_id)
    assert [key.id for key in read_tenant_file(path).keys.keys] == [{"key_a": "key_b", "key_b": "key_a"}[key_id]]
    assert "bare:" in path.read_text()
    assert "# pays" in path.read_text()


def test_the_first_key_makes_the_file_also_behind_a_link(tmp_path):
    made = make_key("acme", secret="a secret of old")
    add_key(tmp_path / "new.yaml", made.key)
    assert read_tenant_file(tmp_path / "new.yaml").keys.find(b"a secret of old") == made.key
    assert made.key.prefix == "", "a short secret is not shown in part"
    target, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    target.write_text("tenants:\n  acme:")
    link.symlink_to(target)
    made = make_key("acme")
    add_key(link, made.key)
    assert link.is_symlink()
    assert read_tenant_file(target).keys.find(made.secret.encode()) == made.key


def test_keys_of_nobody_and_nothing_are_refused_and_the_last_one_can_go(path):
    with pytest.raises(ConfigError, match="has no tenant 'acm'; write it there first, or choose acme, bare"):
        add_key(path, make_key("acm").key)
    with pytest.raises(ConfigError, match="has no key 'x'"):
        remove_key(path, "x")
    assert path.read_text() == FILE
    for key_id in ("key_a", "key_b"):
        remove_key(path, key_id)
    assert not read_tenant_file(path).keys.keys


@pytest.mark.parametrize(("text", "words"), [
    ("tenants: [", "t.yaml:1: "),
    ("tenants:\n  a: {}\n  a: {}\n", "t.yaml:3: 'a' stands twice"),
    ("tenants:\n  a:\n    weight: 1\n    weight: 2\n", "t.yaml:4: 'weight' stands twice"),
    ("tenants:\n  a: !!python/object/apply:os.system [true]\n", "t.yaml:2: "),
    ("tenants:\n  a: &x\n    keys: *x\n", "t.yaml: tenant 'a'"),
    ("", "t.yaml: the file must hold fields"),
    ("\x00", "t.yaml: is not valid YAML"),
    (
        "tenants:\n  {{ name }}: {}\n",
        "t.yaml:2: a mapping is no name; is this a template that nobody has filled in?",
    ),
    ("tenants:\n  ? [a]\n  : {}\n", "t.yaml:2: a sequence is no name"),
    ("tenants:\n  a: {weight: !!bool x}\n", "t.yaml:2: this is no bool"),
    ("tenants:\n  a: {weight: !!timestamp x}\n", "t.yaml:2: this is no timestamp"),
    (f"tenants:\n  a: {{timeout_s: 1{'0' * 400}}}\n", "timeout_s is 1000"),
    (f"tenants:\n  a: {{timeout_s: 0x{'f' * 9000}}}\n", "timeout_s is a huge int"),
    (f"tenants:\n  ? 0x{'f' * 9000}\n  : {{}}\n", "tenant a huge int: a name has"),
    ('tenants:\n  a: {keys: [{id: "\\ud800", sha256: "AAAA"}]}\n', "id is '\\ud800'; it must be a text"),
    (
        "a0: &a0 {a: 1}\n" + "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(99)),
        "over 10000 fields are merged",
    ),
    ("tenants:\n  a: {tier: " + "[" * 1_000, "t.yaml: is not valid YAML"),
])  # fmt: skip
def test_what_is_wrong_is_told_on_one_line(tmp_path, text, words):
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tenant_file(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


PIECES = [
    *(
        "tenants", "acme", "weight", "keys", "id", "sha256", "timeout_s", "1", "1e999", "-.nan", "9" * 400,
        "0x" + "f" * 5000,
    ),
    *("0o9", "1:60", "2024-13-45", "2024-01-01T00:00:00+99", "null", "~", "<<", "=", "&a", "*a", "'", '"', '"\\ud800"'),
    *(
        "!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!binary é", "!!set", "!!omap", "!!pairs", "!!map",
        "!!seq", "!a",
    ),
    *(
        ": ", ":", "- ", "? ", ", ", "{", "}", "{{", "}}", "[", "]", "| ", "> ", "# ", "%", "---", "...", "\n",
        "\n  ", "\n    ", "\t", " ",
    ),
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text()
    | st.binary()
    | st.datetimes()
)
FIELDS = st.sampled_from(["tenants", "a", "weight", "tier", "priorities", "keys", "id", "sha256", "admin"]) | st.text(
    max_size=3
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | LEAVES, inner, max_size=3)
)
TABLES = st.fixed_dictionaries(
    {"tenants": st.dictionaries(FIELDS, st.dictionaries(FIELDS, VALUES, max_size=4), max_size=2)}
)
DOCUMENTS = (
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
    | st.lists(st.sampled_from(PIECES), max_size=12).map(lambda pieces: "tenants:\n  acme:\n    " + "".join(pieces))
    | (TABLES | VALUES).map(lambda value: yaml.safe_dump(value, allow_unicode=True))
    | st.text(max_size=40)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(DOCUMENTS)
def test_no_file_raises_anything_but_a_config_error(tmp_path, text):
    file = tmp_path / "t.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(ConfigError):
        assert read_tenant_file(file).tenants


def test_a_pipe_a_missing_and_a_binary_file_are_told(tmp_path):
    os.mkfifo(tmp_path / "t.yaml")
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        TenantFile(tmp_path / "t.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        TenantFile(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_tenant_file(tmp_path / "b.yaml")


def test_a_changed_file_is_read_and_a_broken_one_is_not(path, caplog):
    file = TenantFile(path, poll_s=0.02)
    try:
        made = make_key("acme")
        add_key(path, made.key)
        until(lambda: file.table.keys.find(made.secret.encode()) is not None)
        good = file.table
        path.write_text("tenants: {acme: {weight: heavy}}")
        until(lambda: "weight is 'heavy'" in caplog.text)
        assert "stay in force" in caplog.text
        assert file.table is good
        path.unlink()
        until(lambda: "No such file" in caplog.text)
        path.write_text("tenants: {other: }")
        until(lambda: "other" in file.table.tenants)
        assert file.table.keys.find(made.secret.encode()) is None
    finally:
        file.close()
        file.close()


def test_whatever_is_wrong_a_key_can_still_be_revoked_and_it_is_told_once(path, caplog):
    made = make_key("acme")
    add_key(path, made.key)
    fails = []

    def accept(table: object) -> None:
        if fails:
            raise fails[0]

    file = TenantFile(path, poll_s=0.01, accept=accept)
    try:
        fails.append(RuntimeError("nobody thought of this"))
        remove_key(path, made.key.id)
        until(lambda: file.num_failures > 3)
        assert file.table.keys.find(made.secret.encode()) is not None
        assert caplog.text.count("nobody thought of this") == 1
        fails.clear()  # and nothing about the file has changed since
        until(lambda: file.table.keys.find(made.secret.encode()) is None)
        path.write_text("tenants:\n  {{ name }}: {}\n")
        until(lambda: "nobody has filled in" in caplog.text)
    finally:
        file.close()


def test_a_reload_comes_at_once_and_a_table_may_be_refused_by_its_user(path):
    file = TenantFile(path, poll_s=60)
    try:
        before = file.table
        status = path.stat()
        path.write_text(FILE.replace("weight: 2", "weight: 4"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        file.reload()
        until(lambda: file.table is not before)
        assert file.table.tenants["acme"].weight == 4
    finally:
        file.close()

    def accept(table: object) -> None:
        raise ConfigError("not this one")

    with pytest.raises(ConfigError, match="not this one"):
        TenantFile(path, accept=accept)
