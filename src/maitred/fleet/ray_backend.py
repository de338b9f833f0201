"""Replicas on a Ray cluster: `RayLauncher` for `--launch ray`, and `app` for Ray Serve. The only file that imports ray.

Raises ConfigError on import without Ray, saying how to install it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from maitred.config import AdmissionConfig, ProcessConfig, SchedulerConfig, ServerConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import ConfigError, did_you_mean
from maitred.fleet import launch
from maitred.fleet.config import PLACEMENTS, FleetConfig
from maitred.fleet.serve_choice import Seen, ServeChoice, key_of
from maitred.fleet.serve_engine import ServedEngine, ServeOptions, read_options, start_engine

MAX_LINES = 10_000  # of its log that wait to be fetched; the oldest are dropped


class HostedReplica:
    """One `maitred serve`, started again when it dies; what becomes of it is asked for. Its calls share an event loop,
    whose thread lives as long as its process.
    """

    def __init__(
        self, name: str, words: Sequence[str], token: str, stop_s: float, find_host: Callable[[], str]
    ) -> None:
        """`find_host` is called here, and tells by which address routers reach this node; else see LocalLauncher."""
        self._name = name
        self._news: list[launch.LaunchEvent] = []
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._something = asyncio.Event()
        self._launcher = launch.LocalLauncher(
            words, token=token, on_event=self._tell, write_line=self._write, host=find_host(), stop_s=stop_s
        )

    async def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._launcher.start(self._name)

    async def heard(self) -> tuple[list[launch.LaunchEvent], list[str]]:
        """Events since the last call, and the log's new lines; waits until there is something."""
        await self._something.wait()
        self._something.clear()
        news, self._news = self._news, []
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return news, lines

    async def stop(self) -> None:
        self._launcher.stop(self._name)

    def _tell(self, event: launch.LaunchEvent) -> None:
        self._news.append(event)
        self._something.set()

    def _write(self, line: str) -> None:
        """Keep a log line; called from a thread of the launcher's."""
        self._lines.append(line)
        self._loop.call_soon_threadsafe(self._something.set)


try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.request_router import RequestRouter
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"Ray is not installed ({error}); install it with: pip install 'maitred[ray]'") from None

HEAR_STOP_S = 15.0  # an actor that was told to stop may take so much longer than its process
_ACTOR = ray.remote(HostedReplica)


# -- where they are


@dataclass(frozen=True, slots=True)
class _Place:
    """Reserved resources: a bundle of a placement group."""

    group: Any
    index: int
    is_shared: bool


class _Places:
    """The first `num_shared` replicas share one placement group, packed or spread as a whole and reserved for good.
    Each beyond has a group of its own, which is given back with it: so a fleet holds no more than it uses, and one that
    is replaced has a place beside its successor.
    """

    def __init__(self, num_shared: int, bundle: Mapping[str, float], placement: str) -> None:
        self._bundle, self._strategy = dict(bundle), placement.upper()
        group = placement_group([self._bundle] * num_shared, strategy=self._strategy) if num_shared else None
        self._shared = group
        self._free = [_Place(group, index, True) for index in reversed(range(num_shared))]

    def take(self) -> _Place:
        if self._free:
            return self._free.pop()
        return _Place(placement_group([self._bundle], strategy=self._strategy), 0, False)

    def give_back(self, place: _Place) -> None:
        if place.is_shared:
            self._free.append(place)
        else:
            remove_placement_group(place.group)

    def close(self) -> None:
        if self._shared is not None:
            remove_placement_group(self._shared)
            self._shared = None


# -- the launcher


@dataclass(slots=True, eq=False)
class _Replica:
    """One name, its place, and its present actor."""

    name: str
    place: _Place
    life: launch.Supervised
    actor: Any = None
    pid: int | None = None  # of the process, once it listens


class RayLauncher:
    """Launcher (see `cluster.launch.Launcher`) of replicas on the nodes of a Ray cluster. Requests and tokens go by
    HTTP between router and replica; Ray places, watches, and ends them with their router.

    A process that dies is started again by its actor, on its node; an actor that is lost, with its node or without, is
    told as ended and made again, where Ray finds room.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        token: str,
        on_event: Callable[[launch.LaunchEvent], None],
        write_line: Callable[[str], None] | None = None,
        placement: str = "pack",
        num_shared: int = 1,
        resources: Mapping[str, float] | None = None,
        clock: Clock | None = None,
        stop_s: float = launch.STOP_S,
    ) -> None:
        """As LocalLauncher; joins the cluster that Ray finds (RAY_ADDRESS, or one on this machine), else begins one.
        `placement` is pack or spread for the first `num_shared` replicas; `resources` are what each takes of its node,
        in Ray's units; None is {"CPU": 1}. Raises ConfigError for another placement, or no cluster there.
        """
        if placement not in PLACEMENTS:
            raise ConfigError(f"placement is {placement!r}{did_you_mean(placement, PLACEMENTS)}; choose pack or spread")
        self._words, self._token, self._on_event, self._stop_s = list(words), token, on_event, stop_s
        self._write_line = write_line or launch.write_to_stderr
        self._clock = clock or WallClock()
        self._resources = dict(resources or {"CPU": 1.0})
        self._has_joined = _connect()
        self._places = _Places(num_shared, self._resources, placement)
        self._replicas: dict[str, _Replica] = {}
        self._hearing: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()

    def start(self, name: str) -> None:
        """Raises ValueError for a name that is taken."""
        if name in self._replicas:
            raise ValueError(f"replica {name!r} is there already")
        self._replicas[name] = replica = _Replica(name, self._places.take(), launch.Supervised(self._clock))
        self._begin(replica)

    def stop(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is None or replica.life.is_stopping:
            return
        replica.life.is_stopping = True
        if replica.actor is None or replica.pid is None:  # it cannot have been asked anything
            self._forget(replica, "stopped before it listened")
            return
        replica.actor.stop.remote()
        patience_s = self._stop_s + HEAR_STOP_S
        words = f"its node said nothing for {patience_s:g} s"
        replica.life.later(patience_s, lambda: self._forget(replica, words))

    def restart(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None and not replica.life.is_stopping:
            self._lost(replica, "it is started anew")

    def pid(self, name: str) -> int | None:
        """None: its process is its node's."""
        return None

    async def close(self) -> None:
        for name in list(self._replicas):
            self.stop(name)
        while self._replicas:
            self._gone.clear()
            await self._gone.wait()
        await asyncio.gather(*self._hearing)
        self._leave()

    def end(self) -> None:
        for replica in self._replicas.values():
            replica.life.cancel()
            self._end_actor(replica)
            if not replica.place.is_shared:
                remove_placement_group(replica.place.group)
        self._replicas.clear()
        self._leave()

    def _leave(self) -> None:
        self._places.close()
        if self._has_joined:
            self._has_joined = False
            ray.shutdown()

    # -- an actor

    def _begin(self, replica: _Replica) -> None:
        replica.life.ready_at = replica.pid = None
        where = PlacementGroupSchedulingStrategy(replica.place.group, replica.place.index)
        actor = _ACTOR.options(**_options(self._resources), scheduling_strategy=where, max_restarts=0).remote(
            replica.name, self._words, self._token, self._stop_s, ray.util.get_node_ip_address
        )
        replica.actor = actor
        hearing = asyncio.get_running_loop().create_task(self._hear(replica, actor), name=f"hear {replica.name}")
        self._hearing.add(hearing)
        hearing.add_done_callback(self._hearing.discard)

    async def _hear(self, replica: _Replica, actor: Any) -> None:
        """Pass on an actor's events until it has ended, or another has its name."""
        try:
            await actor.begin.remote()
            while replica.actor is actor:
                news, lines = await actor.heard.remote()
                for line in lines:
                    self._write_line(line)
                for event in news:
                    if replica.actor is actor:
                        self._heard(replica, event)
        except RayError as error:
            if replica.actor is actor:
                self._lost(replica, f"its node or actor is gone: {_first_line(error)}")

    def _heard(self, replica: _Replica, event: launch.LaunchEvent) -> None:
        match event:
            case launch.Listens(_, _, pid):
                replica.pid = pid
            case launch.IsReady():
                replica.life.ready_at = self._clock.now()
            case launch.Exited(_, cause, as_told, None):
                self._forget(replica, cause, as_told=as_told)
                return
            case launch.Exited():
                replica.pid = replica.life.ready_at = None
        self._on_event(event)

    # -- its end

    def _lost(self, replica: _Replica, cause: str) -> None:
        """The next one comes in the same place, which Ray moves when its node is gone."""
        replica.life.cancel()
        self._end_actor(replica)
        if replica.life.is_stopping:
            self._forget(replica, cause)
            return
        self._write_line(launch.prefixed(replica.name, cause))
        delay_s = replica.life.died(lambda: self._begin(replica), own_fault=False)
        self._on_event(launch.Exited(replica.name, cause, as_told=False, again_in_s=delay_s))

    def _forget(self, replica: _Replica, cause: str, *, as_told: bool = True) -> None:
        replica.life.cancel()
        self._end_actor(replica)
        del self._replicas[replica.name]
        self._places.give_back(replica.place)
        self._gone.set()
        self._on_event(launch.Exited(replica.name, cause, as_told=as_told, again_in_s=None))

    def _end_actor(self, replica: _Replica) -> None:
        """End the actor; its process goes with it."""
        actor, replica.actor = replica.actor, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)


def _connect() -> bool:
    """Whether it was for us to join, and so is to leave. Leaves signals as they were: the router drains by them."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported unasked
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no Ray cluster: {_first_line(error)}; RAY_ADDRESS says where it is") from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return True


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Options of an actor, which names two of its resources apart."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": others}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# -- Ray Serve


class EngineReplica:
    """A Serve replica: the same engine and routes as `maitred serve`, behind Serve's proxies."""

    async def __init__(self, options: ServeOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        self._engine = await start_engine(options)

    def __serve_build_asgi_app__(self) -> ServedEngine:
        return self._engine

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._engine.counters()

    def check_health(self) -> None:
        self._engine.check()


class FleetRouter(RequestRouter):  # type: ignore[misc]
    """Serve's RequestRouter by our balances; Serve passes on to the next of those ranked where one is full."""

    def initialize_state(self, balance: str = "hash", max_load_ratio: float = 1.25) -> None:
        self._choice = ServeChoice(balance, max_load_ratio)
        self._in_flight: dict[Any, set[str]] = {}  # sent from here, by replica
        self._clock = WallClock()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        seen = [Seen(name, self._load(of.replica_id), of.max_ongoing_requests) for name, of in by_name.items()]
        key, request_id = None, ""
        if pending_request is not None:
            metadata = pending_request.metadata  # Serve has read x-session-id; the rest it hands on pickled
            key, request_id = key_of(metadata.session_id), metadata.internal_request_id
        ranked = self._choice.ranked(seen, key, request_id, self._clock.now())
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._in_flight.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._in_flight.get(replica_id, set()).discard(internal_request_id)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._in_flight.pop(replica_id, None)

    def _load(self, replica_id: Any) -> int:
        """The replica's last report of all proxies' requests, or the requests sent from here; the larger."""
        return max(self.replica_queue_len_cache.get(replica_id) or 0, len(self._in_flight.get(replica_id, ())))


def app(args: Mapping[str, Any]) -> serve.Application:
    """A Ray Serve application: `import_path: maitred.fleet.ray_backend:app`. `args` are ServeOptions' fields and the
    settings of `maitred serve` by name (`model`, `max_num_seqs`, `api_keys`, ...). Raises ConfigError.
    """
    options = read_options(args)
    slots = len(options.part(ProcessConfig).roles) * options.part(SchedulerConfig).max_num_seqs
    objective_s = options.part(AdmissionConfig).ttft_objective_s
    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        metrics_interval_s=1.0,
        look_back_period_s=2.0,
        upscale_delay_s=0.0,  # when to heed a need is the policy's
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(
            policy_function="maitred.fleet.serve_choice:ServeScaling",
            policy_kwargs={"slots": slots, "idle_s": options.idle_s, "ttft_objective_s": objective_s},
        ),
    )
    routing = RequestRouterConfig(
        request_router_class=f"{__name__}:FleetRouter",
        request_router_kwargs={"balance": options.balance, "max_load_ratio": options.max_load_ratio},
    )
    return (
        serve.deployment(serve.ingress()(EngineReplica))
        .options(
            name="maitred",
            max_ongoing_requests=FleetConfig().limit_of(slots),
            autoscaling_config=scaling,
            request_router_config=routing,
            graceful_shutdown_timeout_s=options.part(ServerConfig).drain_timeout_s,
            ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        )
        .bind(options)
    )
