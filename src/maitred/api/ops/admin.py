"""Routes for administrators: queue, policy and adapters, changed while requests run; what if; KV tiers; sleep.

Sleep and adapters have the routes and answers of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.config import PolicyArg, SchedulerConfig
from maitred.core.errors import (
    CheckpointError,
    ConfigError,
    GenerationFailed,
    InvalidRequest,
    KernelError,
    ModelNotFound,
    RateLimited,
    RequestTimeout,
    RouteNotFound,
)
from maitred.core.replica import TierView, WorkerView
from maitred.engine.adapter_book import AdapterBook
from maitred.engine.installed import policy_of
from maitred.engine.queries import AdapterFolder
from maitred.engine.traffic import ReplayAsked, WhatIf
from maitred.fleet.actions import MAX_REQUESTS
from maitred.scheduler.queue_view import MAX_PAGE

LIMITS = frozenset({"max_num_seqs", "max_num_batched_tokens"})  # memory was planned for them
LEVELS = ("0", "1", "2")
MODES = ("wait", "abort")
SLEEP_QUERY: dict[str, dict[str, Any]] = {
    "level": {"enum": [int(level) for level in LEVELS], "default": 1},
    "mode": {"enum": [*MODES], "default": "wait"},
}
WAKE_QUERY: dict[str, dict[str, Any]] = {"tags": {"type": "array", "items": {"type": "string"}}}
LOADING_ADAPTERS = "load and unload adapters"  # what it takes an administrator for
MAX_ADAPTER_NAME = 128


class Roles(msgspec.Struct, frozen=True):
    """The workers and their roles."""

    workers: tuple[WorkerView, ...]


class PolicyView(msgspec.Struct, frozen=True):
    """The policy, the settings of all policies, and the names of those that could be chosen."""

    policy: str
    parameters: dict[str, Any]
    choices: tuple[str, ...]
    arguments: dict[str, PolicyArg]  # what this policy makes of them: its own parameters, by name


class PolicyChange(msgspec.Struct, frozen=True):
    """`policy`, and any of the parameters that GET /admin/policy shows; what is left out stays as it is, but for
    `policy_args`, which belong to a policy: another one begins without any.
    """

    policy: str | msgspec.UnsetType = msgspec.UNSET


_CHANGES = msgspec.json.Decoder(dict[str, Any])


async def show_queue(app: App, exchange: Exchange) -> None:
    """A page of the queue: `offset` and `limit` of the query say which."""
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    offset, limit = _count(query, "offset", 0), _count(query, "limit", 100)
    if limit > MAX_PAGE:
        raise InvalidRequest(f"limit is {limit}; it must be at most {MAX_PAGE}", param="limit")
    await exchange.answer_json(await app.replica.queue_view(offset=offset, limit=limit))


async def show_policy(app: App, exchange: Exchange) -> None:
    """The policy in force."""
    engine = app.replica
    await exchange.answer_json(policy_view(await engine.scheduler_config(), await engine.policy_names()))


async def change_policy(app: App, exchange: Exchange) -> None:
    """Orders everything by another policy, or by the same one with other parameters; answers when it is in force."""
    engine = app.replica
    changes = await exchange.json(_CHANGES)
    config = changed(await engine.scheduler_config(), changes)
    try:
        await engine.configure(config)
    except ConfigError as error:
        raise InvalidRequest(str(error), param="policy") from None
    app.reconfigured(config)
    await exchange.answer_json(policy_view(config, await engine.policy_names()))


async def show_roles(app: App, exchange: Exchange) -> None:
    """The engines of this server, what is sent to each, and how it is."""
    await exchange.answer_json(Roles(app.replica.workers()))


async def show_choices(app: App, exchange: Exchange) -> None:
    """Which worker one of the last requests went to, and why."""
    made = app.replica.choices_of(exchange.parameter)
    if made is None:
        raise RouteNotFound(
            f"{exchange.parameter!r} is none of the last {MAX_REQUESTS:,} requests that were sent to one of several "
            "engines; a single engine's decision log tells of waits"
        )
    await exchange.answer_json(made)


class Sleeping(msgspec.Struct, frozen=True):
    """Whether there is no engine, on purpose."""

    is_sleeping: bool


async def sleep(app: App, exchange: Exchange) -> None:
    """End the engine's process; 200 when it is gone. `mode` wait lets requests finish first, abort ends them.

    Weights and KV go at every `level`: the next start maps the weights again.
    """
    query = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    _one_of(query, "level", LEVELS, "1")
    mode = _one_of(query, "mode", MODES, "wait")
    async with app.in_flight.watch(exchange):
        await app.replica.sleep(abort=mode == "abort")
    await exchange.answer(b"", 200, ())


async def wake_up(app: App, exchange: Exchange) -> None:
    """Start the engine; 200 when it is ready. `tags` are accepted: weights and KV come together."""
    async with app.in_flight.watch(exchange):
        await app.replica.wake_up()
    await exchange.answer(b"", 200, ())


async def is_sleeping(app: App, exchange: Exchange) -> None:
    await exchange.answer_json(Sleeping(app.replica.state().asleep))


def _one_of(query: dict[str, list[str]], name: str, choices: tuple[str, ...], default: str) -> str:
    value = query.get(name, [default])[-1]
    if value not in choices:
        raise InvalidRequest(f"{name} is {shortened(repr(value))}; choose one of {', '.join(choices)}", param=name)
    return value


class LoadAdapter(msgspec.Struct, frozen=True):
    """`lora_path` is relative to --lora-dir. A name that is there already stands for the new files from then on."""

    lora_name: str
    lora_path: str


class UnloadAdapter(msgspec.Struct, frozen=True):
    lora_name: str


_LOAD_ADAPTER, _UNLOAD_ADAPTER = msgspec.json.Decoder(LoadAdapter), msgspec.json.Decoder(UnloadAdapter)


async def load_adapter(app: App, exchange: Exchange) -> None:
    """Answers when the folder was read and checked; requests may name it from then on."""
    asked = await exchange.json(_LOAD_ADAPTER)
    book = _adapter_book(app)
    folder = _adapter_folder(app, asked, book.folder or "")
    async with app.in_flight.watch(exchange):
        try:
            await book.load(folder)
        except (CheckpointError, ConfigError, KernelError) as error:
            raise InvalidRequest(f"adapter {asked.lora_name}: {error}", param="lora_path") from None
    await _say_done(exchange, f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


async def unload_adapter(app: App, exchange: Exchange) -> None:
    """At once for new requests; answers when those that have it are done."""
    asked = await exchange.json(_UNLOAD_ADAPTER)
    book = _adapter_book(app)
    if asked.lora_name not in book.named:
        raise ModelNotFound(f"the adapter {shortened(repr(asked.lora_name))} is not loaded", param="lora_name")
    async with app.in_flight.watch(exchange):
        await book.unload(asked.lora_name)
    await _say_done(exchange, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


async def _say_done(exchange: Exchange, text: str) -> None:
    await exchange.answer(text.encode(), 200, ((b"content-type", b"text/plain; charset=utf-8"),))


def _adapter_book(app: App) -> AdapterBook:
    if app.adapters is None or app.adapters.folder is None:
        raise InvalidRequest("adapters are loaded and unloaded only where the server was started with --lora-dir DIR")
    return app.adapters


def _adapter_folder(app: App, asked: LoadAdapter, allowed: str) -> AdapterFolder:
    """Raises InvalidRequest for a name that no adapter may have, and for a path out of --lora-dir."""
    name, path = asked.lora_name, asked.lora_path
    if not 1 <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable() or name != name.strip() or "@" in name:
        raise InvalidRequest(
            f"lora_name is {shortened(repr(name))}; it has 1 to {MAX_ADAPTER_NAME} printable characters, "
            "none of them @, and no space around it",
            param="lora_name",
        )
    if app.is_model(name):
        raise InvalidRequest(f"{name!r} is a name of the model itself; choose another", param="lora_name")
    root = Path(allowed).resolve()
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        folder = root.parent
    if Path(path).is_absolute() or folder == root or not folder.is_relative_to(root):
        raise InvalidRequest(
            f"lora_path is {shortened(repr(path))}; it must be a folder inside --lora-dir, relative to it, wherever "
            "links lead",
            param="lora_path",
        )
    return AdapterFolder(name, str(folder), str(root))


def policy_view(config: SchedulerConfig, choices: tuple[str, ...]) -> PolicyView:
    parameters = {name: value for name, value in asdict(config).items() if name not in LIMITS and name != "policy"}
    return PolicyView(config.policy, parameters, choices, dict(policy_of(config).arguments))


REPLAY = (sys.executable, "-P", "-m", "maitred.sim.whatif")
REPLAY_S = 30.0  # most time of a replay
NICE = 10  # so that serving goes before it


class WhatIfReplay:
    """Replays what this server has served under other terms, in a process of its own, one at a time."""

    def __init__(self) -> None:
        self._is_busy = False

    async def __call__(self, app: App, exchange: Exchange) -> None:
        """The comparison of what was measured, the replay as it is, and the replay under the change."""
        change = await exchange.json(_WHAT_IF)
        if any(worker.role != "mixed" for worker in app.replica.workers()):
            raise InvalidRequest(
                "a server whose engines have roles is not replayed; maitred simulate --prefill-workers"
            )
        if self._is_busy:
            raise RateLimited("a replay is running; ask again when it is done", limit="replays", retry_after_s=5.0)
        self._is_busy = True
        try:
            async with app.in_flight.watch(exchange):
                told = await _replayed(change, await app.replica.recordings())
        finally:
            self._is_busy = False
        if told.startswith(b'{"error":'):
            raise InvalidRequest(msgspec.json.decode(told)["error"])
        await exchange.answer(told, 200, JSON_HEADERS)


_WHAT_IF = msgspec.json.Decoder(WhatIf)


async def _replayed(change: WhatIf, recordings: list[bytes]) -> bytes:
    """Answer of the replay's process. Raises RequestTimeout, GenerationFailed."""
    engines: Any = [msgspec.Raw(each) for each in recordings if each]
    process = await asyncio.create_subprocess_exec(*REPLAY, stdin=PIPE, stdout=PIPE)
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        async with asyncio.timeout(REPLAY_S):
            told, _ = await process.communicate(msgspec.msgpack.encode(ReplayAsked(change, engines)))
    except TimeoutError:
        raise RequestTimeout(
            f"the replay took longer than {REPLAY_S:.0f} s; ask for fewer minutes than {change.minutes:g}"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not told:
        raise GenerationFailed(f"the replay ended with exit code {process.returncode}; the server's log has the cause")
    return told


class Tiers(msgspec.Struct, frozen=True):
    """The fastest first; none where nothing outlives a request."""

    tiers: tuple[TierView, ...]


class Cleared(msgspec.Struct, frozen=True):
    """How many blocks there were."""

    num_blocks: int


async def show_kv(app: App, exchange: Exchange) -> None:
    """Bytes, hits, drops by reason, and from how many tokens on fetching is faster than computing."""
    await exchange.answer_json(Tiers(await app.replica.kv_tiers()))


async def clear_kv(app: App, exchange: Exchange) -> None:
    """Empties the tiers; answers when they are empty. What is in the engine's memory stays."""
    await exchange.answer_json(Cleared(await app.replica.clear_kv()))


def changed(config: SchedulerConfig, changes: dict[str, Any]) -> SchedulerConfig:
    """`config` with those changes. Raises InvalidRequest, naming the field."""
    values = asdict(config)
    choices = sorted(values.keys() - LIMITS)
    for name in changes:
        if name not in choices:
            raise InvalidRequest(
                f"{shortened(name)!r} is no setting of a policy; choose from {', '.join(choices)}",
                param=shortened(name),
            )
    if changes.get("policy", config.policy) != config.policy:
        values["policy_args"] = {}
    else:  # a setting that is changed by its own name is not held back by an argument of that name
        values["policy_args"] = {k: v for k, v in config.policy_args.items() if k not in changes}
    try:
        return msgspec.convert({**values, **changes}, SchedulerConfig)
    except (msgspec.ValidationError, ConfigError) as error:
        raise InvalidRequest(str(error), param=next(iter(changes), None)) from None


def _count(query: dict[str, list[str]], name: str, default: int) -> int:
    words = query.get(name, [str(default)])
    if not (words[-1].isascii() and words[-1].isdigit() and len(words[-1]) < 10):
        raise InvalidRequest(f"{name} is {shortened(words[-1])!r}; it must be a whole number", param=name)
    return int(words[-1])
