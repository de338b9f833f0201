"""Routes for whoever runs the server: the queue, and the policy, which can be changed while requests run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qs

import msgspec

from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.cluster.choices import MAX_REQUESTS
from maitred.config import PolicyArg, SchedulerConfig
from maitred.engine.installed import policy_of
from maitred.errors import ConfigError, InvalidRequest, RouteNotFound
from maitred.replica import WorkerView
from maitred.scheduler.queue_view import MAX_PAGE

LIMITS = frozenset({"max_num_seqs", "max_num_batched_tokens"})  # memory was planned for them


class Roles(msgspec.Struct, frozen=True):
    """Who does what."""

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
        raise RouteNotFound(f"{exchange.parameter!r} is none of the last {MAX_REQUESTS:,} requests that were sent")
    await exchange.answer_json(made)


def policy_view(config: SchedulerConfig, choices: tuple[str, ...]) -> PolicyView:
    parameters = {name: value for name, value in asdict(config).items() if name not in LIMITS and name != "policy"}
    return PolicyView(config.policy, parameters, choices, dict(policy_of(config).arguments))


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
