"""The engine inside a Ray Serve replica: its arguments, its start, our ASGI application around it, what it counts."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from maitred.config import PARTS, AdmissionConfig, EngineConfig, ProcessConfig, SchedulerConfig, ServerConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import ConfigError, EngineDead, did_you_mean
from maitred.engine.client import EngineClient
from maitred.engine.starting import Engine, StartingEngine
from maitred.engine.supervisor import Start
from maitred.fleet.config import FleetConfig
from maitred.fleet.serve_choice import ARRIVED, ENDED, SERVED_S, START_S
from maitred.fleet.workers import Workers

SERVING = "maitred.api.serving"  # by name: layers above this one are imported only where they run
OF_ENGINE = {name: part for name, part in PARTS.items() if name != "tiers"} | {"admission": AdmissionConfig}
TAKEN = (*OF_ENGINE.values(), ProcessConfig, ServerConfig)
NOT_HERE = ("host", "port", "announce_fd", "ssl_certfile", "ssl_keyfile", "tenants", "ledger")  # Serve listens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Arguments of the application, besides the settings of `maitred serve`, which go by their names there."""

    min_replicas: int = 1
    """Fewest replicas; 0 lets the last one go after `idle_s`."""
    max_replicas: int = 1
    """Most of them."""
    balance: str = "hash"
    """Which replica a request goes to: hash or session (by its conversation's header, without one by least load),
    least_load, two_choices or round_robin."""
    max_load_ratio: float = 1.25
    """Nobody is sent to a replica with more than this times the mean in flight, plus one, while another has room."""
    idle_s: float = 300.0
    """Without a request for so long (s), the last replica stops, where there need be none."""
    num_cpus: float = 1.0
    """Processors that each replica takes of its node."""
    num_gpus: float = 0.0
    """GPUs that each replica takes of its node."""
    settings: Mapping[type, Mapping[str, Any]] = field(default_factory=dict)
    """Of the parts of the configuration, as given."""

    def __post_init__(self) -> None:
        FleetConfig(balance=self.balance, max_load_ratio=self.max_load_ratio)
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ConfigError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                "give 0 <= min_replicas <= max_replicas, and 1 or more of these"
            )

    def part(self, kind: type) -> Any:
        """One part of the configuration."""
        return kind(**self.settings.get(kind, {}))

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(**{name: self.part(part) for name, part in OF_ENGINE.items()})


def read_options(given: Mapping[str, Any]) -> ServeOptions:
    """Raises ConfigError for a name that nothing has, and for a value that its part refuses."""
    own = {f.name for f in fields(ServeOptions)} - {"settings"}
    where = {f.name: part for part in TAKEN for f in fields(part) if f.name not in NOT_HERE}
    settings: dict[type, dict[str, Any]] = {}
    for name in given.keys() - own:
        if name not in where:
            raise ConfigError(f"{name} is no argument of the application{did_you_mean(name, [*own, *where])}")
        value = given[name]
        settings.setdefault(where[name], {})[name] = tuple(value) if isinstance(value, list) else value
    options = ServeOptions(**{name: given[name] for name in own & given.keys()}, settings=settings)
    for part in TAKEN:
        options.part(part)
    return options


class ServedEngine:
    """A running engine, and the ASGI application that serves it and counts what Serve's autoscaling asks for."""

    def __init__(self, engine: Engine, options: ServeOptions, start_s: float, clock: Clock) -> None:
        self._replica, self._clock, self._start_s = engine.replica, clock, start_s
        self._num_arrived = self._num_ended = 0
        self._served_s = 0.0
        self._app: Callable[..., Any] = importlib.import_module(SERVING).create_app(
            engine.replica,
            engine.model,
            options.part(ServerConfig),
            policy=options.part(SchedulerConfig).policy,
            admission=engine.admission,
            start_phases=engine.start_phases,
        )

    async def __call__(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: Callable[..., Any]) -> None:
        """ASGI; the end of the lifespan is the engine's."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http" or scope["method"] != "POST":  # to look is no load
            await self._app(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, *exchange: Any) -> None:
        self._num_arrived += 1
        began_at = self._clock.now()
        try:
            await self._app(*exchange)
        finally:
            self._num_ended += 1
            self._served_s += self._clock.now() - began_at

    async def _live(self, receive: Callable[[], Any], send: Callable[..., Any]) -> None:
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await self._replica.close()
        await send({"type": "lifespan.shutdown.complete"})

    def counters(self) -> dict[str, float]:
        return {ARRIVED: self._num_arrived, ENDED: self._num_ended, SERVED_S: self._served_s, START_S: self._start_s}

    def check(self) -> None:
        """Raises EngineDead when it is given up: Serve then makes another replica."""
        state = self._replica.state()
        if not state.alive and not state.loading:
            raise EngineDead(state.error or "the engine is dead")


async def start_engine(options: ServeOptions, clock: Clock | None = None) -> ServedEngine:
    """Returns when it has loaded; raises what keeps it from loading. Call it in a thread that lives as long as its
    process does: the engine's process ends with it.
    """
    clock = clock or WallClock()
    began_at = clock.now()
    start = Start(
        config=options.engine,
        process=options.part(ProcessConfig),
        served_model_names=options.part(ServerConfig).served_model_names,
        log_level=logging.getLogger().level,
    )
    make = Workers if len(start.process.roles) > 1 else EngineClient
    starting = StartingEngine(start, on_event=logging.getLogger("maitred.start").info, make=make)
    try:
        engine = await asyncio.to_thread(starting.wait)
    except BaseException:
        starting.give_up()
        raise
    engine.replica.attach(asyncio.get_running_loop())
    return ServedEngine(engine, options, clock.now() - began_at, clock)
