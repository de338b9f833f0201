"""`tenants.yaml` on disk: read, watched for changes, and given new keys without touching what its author wrote."""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maitred.core.errors import ConfigError
from maitred.storage.files import replace_file
from maitred.tenancy.keys import PREFIX_CHARS, Key, digest_of
from maitred.tenancy.tenant import TenantTable, read_tenants

logger = logging.getLogger(__name__)
POLL_S = 1.0
_MOST_MERGED = 10_000  # fields that `<<` brings into a mapping; they may double with each line of a file


class TenantFile:
    """The table of a file that may change while we serve. Raises ConfigError when it is wrong at the start.

    A thread looks once a second whether the file changed (`reload` has it look at once). What is wrong later, whatever
    it is, is told in one log line and not taken: the table that was good stays, and each look tries again, because a
    revoked key must not live on for a disk that failed once. `accept` may refuse a table with a ConfigError.
    """

    def __init__(
        self, path: Path, *, poll_s: float = POLL_S, accept: Callable[[TenantTable], None] = lambda table: None
    ) -> None:
        self.path = path
        self._accept = accept
        self._seen: tuple[int, ...] | None = _look(path)
        self.table = self._read()  # replaced as a whole, so any thread may take it at any time
        self.num_failures = 0
        """Looks, since the start, at which the file could not be taken."""
        self._told = ""
        self._poll_s = poll_s
        self._wanted, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="maitred-tenants", daemon=True)
        self._thread.start()

    def reload(self) -> None:
        """Read the file again soon; may be called in a signal handler."""
        self._seen = None
        self._wanted.set()

    def close(self) -> None:
        """Stop watching; idempotent."""
        self._stopping = True
        self._wanted.set()
        self._thread.join()

    def _read(self) -> TenantTable:
        table = read_tenant_file(self.path)
        self._accept(table)
        return table

    def _run(self) -> None:
        while True:
            self._wanted.wait(self._poll_s)
            self._wanted.clear()
            if self._stopping:
                return
            seen = _look(self.path)
            if seen == self._seen:
                continue
            self._seen = seen  # before it is read: what changes meanwhile, or is asked for by `reload`, is seen again
            try:
                self.table = self._read()
                self._told = ""
                logger.info("%s: %d tenants with %d keys", self.path, len(self.table.tenants), len(self.table.keys))
            except Exception as error:  # whatever it is: while this thread lives, a key can still be revoked
                self._seen = None
                self.num_failures += 1
                self._tell(str(error) if isinstance(error, ConfigError) else f"{self.path}: {error!r}")

    def _tell(self, failure: str) -> None:
        """Log the failure once, and not at each look."""
        if failure != self._told:
            self._told = failure
            logger.error("%s; the tenants and keys of before stay in force", failure)


def _look(path: Path) -> tuple[int, ...]:
    """Differs after every change of the file, also when another took its place."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_tenant_file(path: Path) -> TenantTable:
    """Raises ConfigError and nothing else: file, line or tenant and field, and what to write instead."""
    return read_tenants(parsed_yaml(_text_of(path), path), str(path))


def _text_of(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is a pipe or a device, which cannot be read twice; give a file")
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tenants in {path}: {error.strerror}; give the path of a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; give a YAML file") from None


def _at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe without a writer must not block us."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Loader(yaml.SafeLoader):
    """YAML's safe types only, and a key that stands twice is an error: the second would silently win."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # `!!bool x` is a KeyError, `!!int ""` an IndexError, `!!timestamp x` an AttributeError
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no {kind}", node.start_mark) from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        num_own = len(node.value)
        super().flatten_mapping(node)
        if len(node.value) > num_own + _MOST_MERGED:
            problem = f"over {_MOST_MERGED} fields are merged into a mapping"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = f"a {key.id} is no name; is this a template that nobody has filled in?"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parsed_yaml(text: str, path: Path) -> Any:
    """What a YAML file says, in safe types. Raises ConfigError, also for a key that stands twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: {error.problem}; write valid YAML") from None
    except Exception as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None


# ---- keys: making, adding, revoking


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the one moment when its secret is known."""

    secret: str
    key: Key


def make_key(tenant: str, *, secret: str | None = None, name: str = "", admin: bool = False) -> NewKey:
    """A key of 256 random bits, or of a `secret` that exists already."""
    secret = secret or f"mt-{secrets.token_urlsafe(32)}"
    key = Key(
        id=f"key_{secrets.token_hex(6)}",
        tenant=tenant,
        digest=digest_of(secret.encode()),
        prefix=secret[:PREFIX_CHARS] if len(secret) >= 4 * PREFIX_CHARS else "",
        name=name,
        admin=admin,
    )
    return NewKey(secret, key)


def entry_of(key: Key) -> str:
    """The key's line in the file."""
    fields: dict[str, object] = {"id": key.id}
    if key.name:
        fields["name"] = key.name
    if key.admin:
        fields["admin"] = True
    if key.prefix:
        fields["prefix"] = key.prefix
    fields["sha256"] = key.digest.hex()
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items()) + "}"


def add_key(path: Path, key: Key) -> None:
    """Write `key` below its tenant; a file that is not there is made, with that tenant. Raises ConfigError."""
    if not path.exists():
        name = key.tenant if parsed_yaml(key.tenant, path) == key.tenant else json.dumps(key.tenant)
        text = f"tenants:\n  {name}:\n    keys:\n      - {entry_of(key)}\n"
        read_tenants(parsed_yaml(text, path), str(path))
        _write(path, text)
        return
    text = _text_of(path)
    wanted = parsed_yaml(text, path)
    tenants = read_tenants(wanted, str(path)).tenants
    if key.tenant not in tenants:
        raise ConfigError(f"{path} has no tenant {key.tenant!r}; write it there first, or choose {', '.join(tenants)}")
    assert isinstance(wanted, dict)
    fields = wanted["tenants"][key.tenant] or {}
    fields["keys"] = [yaml.safe_load(entry_of(key)), *(fields.get("keys") or [])]
    wanted["tenants"][key.tenant] = fields
    _write_edited(path, _with_key(text, key), wanted)


def remove_key(path: Path, key_id: str) -> Key:
    """Take a key out; it opens nothing from the next look at the file on. Raises ConfigError."""
    text = _text_of(path)
    wanted = parsed_yaml(text, path)
    keys = {key.id: key for key in read_tenants(wanted, str(path)).keys.keys}
    if key_id not in keys:
        raise ConfigError(f"{path} has no key {key_id!r}; `maitred keys list` shows those it has")
    assert isinstance(wanted, dict)
    fields = wanted["tenants"][keys[key_id].tenant]
    fields["keys"] = [entry for entry in fields["keys"] if entry["id"] != key_id] or None
    _write_edited(path, _without_key(text, keys[key_id]), wanted)
    return keys[key_id]


def _write_edited(path: Path, edited: str | None, wanted: object) -> None:
    """Write `edited` if it says what is wanted, else everything anew, which loses comments but nothing else."""
    try:
        good = edited is not None and parsed_yaml(edited, path) == wanted
    except ConfigError:
        good = False
    text = edited if good and edited is not None else yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)
    read_tenants(parsed_yaml(text, path), str(path))
    _write(path, text)


def _with_key(text: str, key: Key) -> str | None:
    """`text` with one line more, above the tenant's other keys; None where its form has no place for a line."""
    name, fields = _tenant_node(text, key.tenant)
    lines = text.splitlines(keepends=True)
    if isinstance(fields, yaml.MappingNode) and not fields.flow_style:
        listed = _value(fields, "keys")
        if isinstance(listed, yaml.SequenceNode) and not listed.flow_style:
            at, indent, above = listed.start_mark.line, listed.start_mark.column, ""
        elif isinstance(listed, yaml.SequenceNode) and not listed.value:  # keys: []
            before, after = text[: listed.start_mark.index], text[listed.end_mark.index :]
            return f"{before.rstrip(' ')}\n{' ' * (fields.start_mark.column + 2)}- {entry_of(key)}{after}"
        elif listed is None:
            indent = fields.start_mark.column
            at, above = fields.start_mark.line, f"{' ' * indent}keys:\n"
            indent += 2
        else:
            return None
    elif isinstance(fields, yaml.ScalarNode) and not fields.value:
        indent = name.start_mark.column + 2
        at, above = name.end_mark.line + 1, f"{' ' * indent}keys:\n"
        indent += 2
    else:
        return None
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    return "".join([*lines[:at], f"{above}{' ' * indent}- {entry_of(key)}\n", *lines[at:]])


def _without_key(text: str, key: Key) -> str | None:
    _, fields = _tenant_node(text, key.tenant)
    listed = _value(fields, "keys")
    if not isinstance(listed, yaml.SequenceNode) or listed.flow_style:
        return None
    for entry in listed.value:
        known = _value(entry, "id")
        if isinstance(known, yaml.ScalarNode) and known.value == key.id:
            lines = text.splitlines(keepends=True)
            last = entry.end_mark.line + bool(entry.flow_style)  # a block ends where the next thing begins
            return "".join([*lines[: entry.start_mark.line], *lines[last:]])
    return None


def _tenant_node(text: str, tenant: str) -> tuple[yaml.Node, yaml.Node | None]:
    """A tenant's name and fields where they are written; no fields where `<<` brought them in."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    tenants = _value(root, "tenants")
    assert isinstance(tenants, yaml.MappingNode), "it was read as such"
    return next(((key, value) for key, value in tenants.value if key.value == tenant), (tenants, None))


def _value(node: yaml.Node | None, name: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _write(path: Path, text: str) -> None:
    """All or nothing, readable by its owner alone; a link stays a link."""
    try:
        replace_file(Path(os.path.realpath(path)), text.encode(), mode=0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
