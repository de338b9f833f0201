"""An engine in this process behind the server's own application, for `chat` and `run` without a URL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from maitred.cli.command import Options
from maitred.cli.flags import UsageError, flags_of
from maitred.config import PARTS, POLICY_NAMES, EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig, ServerConfig
from maitred.core.errors import did_you_mean
from maitred.model.checkpoint import check_model

if TYPE_CHECKING:
    from maitred.cli.endpoint import AppEndpoint
    from maitred.engine.starting import Engine

# EngineConfig gives only its own scalar fields: its parts stand before it
ENGINE_PARTS: tuple[type, ...] = (*PARTS.values(), EngineConfig)


def engine_config(options: Options) -> EngineConfig:
    """Raises UsageError for an unknown policy, ConfigError for an argument that it has not, and CheckpointError
    for a model's files that cannot be served, before the engine is imported."""
    _check_policy(options[SchedulerConfig])
    check_model(options[ModelConfig].model)
    return replace(options[EngineConfig], **{name: options[part] for name, part in PARTS.items()})


def _check_policy(config: SchedulerConfig) -> None:
    if config.policy in POLICY_NAMES and not config.policy_args:
        return
    from maitred.engine.installed import installed_policies
    from maitred.policy.parameters import make_policy

    policies = installed_policies()
    if config.policy not in policies:
        hint = did_you_mean(config.policy, policies)
        raise UsageError(f"--policy is {config.policy!r}{hint}; choose one of {', '.join(policies)}")
    make_policy(policies[config.policy], config)


def start_engine(
    config: EngineConfig,
    *,
    served_model_names: tuple[str, ...] = (),
    on_event: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Imports the engine only now, so that help and slips of the pen cost nothing."""
    from maitred.engine.build import load_engine
    from maitred.engine.engine_thread import in_thread
    from maitred.engine.starting import StartingEngine
    from maitred.engine.supervisor import Start

    start = Start(
        config=config, process=ProcessConfig(), served_model_names=served_model_names, open=in_thread(load_engine)
    )
    return StartingEngine(start, on_event=on_event).wait()


def refuse_engine_flags(options: Options, *, allowed: tuple[str, ...] = ()) -> None:
    """Raise UsageError for engine flags, which would do nothing in silence: with --url the engine is elsewhere."""
    idle = [
        flag.name
        for part in ENGINE_PARTS
        for flag in flags_of(part)
        if flag.name not in allowed and getattr(options[part], flag.field) != flag.default
    ]
    if idle:
        raise UsageError(
            f"{', '.join(idle)}: with --url the model runs elsewhere, so leave that out, or leave out --url"
        )


@asynccontextmanager
async def local_endpoint(engine: Engine, options: Options) -> AsyncIterator[AppEndpoint]:
    """The application without its port, open to this process alone; closes the engine."""
    from maitred.api.serving import create_app
    from maitred.cli.endpoint import AppEndpoint

    app = create_app(engine.replica, engine.model, ServerConfig(), policy=options[SchedulerConfig].policy)
    try:
        yield AppEndpoint(app)
    finally:
        await engine.replica.close()
