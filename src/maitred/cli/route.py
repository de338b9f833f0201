"""`maitred route URL ...`: one address for many replicas."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from maitred.cli.command import Command, Options, deferred
from maitred.cli.flags import UsageError, flags_of, option
from maitred.cli.main import noted
from maitred.cli.serve import (
    SeveralOptions,
    TenancyConfig,
    bind,
    listen,
    open_tenancy,
    spare_the_collector,
    teller,
    url_of,
)
from maitred.config import HANDOVERS, AdmissionConfig, SchedulerConfig, ServerConfig
from maitred.config.bounds import Bounds
from maitred.core.errors import ConfigError
from maitred.core.objectives import promised
from maitred.fleet.config import PLACEMENTS, FleetConfig, RouteTarget, SharedConfig, parse_target
from maitred.fleet.disagg import HandoverConfig
from maitred.fleet.sizing import AutoscaleConfig, Autoscaler

if TYPE_CHECKING:
    from maitred.api.http.fleet_headers import FleetToken
    from maitred.api.http.routes import Route
    from maitred.api.route.fleet import MakeLauncher
    from maitred.api.route.router import Router
    from maitred.fleet.swapping import ModelSet
    from maitred.storage.key_files import TenantFile
    from maitred.storage.ledger import Ledger


_OF_REPLICAS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "served_model_names",
    "default_max_n",
    "strict_fields",
    "decode_timeout_s",
    "start_budget_s",
)
_OF_LAUNCHED = ("launch", "placement", "idle_s", "warm", "asleep")


class PlannedLayout(msgspec.Struct):
    """A layout of `maitred plan --json`, as far as it is started."""

    handover: str
    replicas: list[list[str]]
    """Words of `maitred serve` for each."""


class PlanFile(msgspec.Struct):
    """What `maitred plan --json` writes, the best layout first."""

    plans: list[PlannedLayout]
    model: str | None = None


def read_plan(path: str) -> PlanFile:
    """Raises ConfigError."""
    try:
        plan = msgspec.json.decode(Path(path).read_bytes(), type=PlanFile)
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; write one with maitred plan --json FILE") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--plan {path}: {error}; write one with maitred plan --json FILE") from None
    if not plan.plans:
        raise ConfigError(f"--plan {path}: has no layout, because none met the objectives; plan with others")
    return plan


def _local(words: tuple[str, ...], token: str, given: RouteOptions, several: ModelSet | None) -> MakeLauncher:
    """Replicas on this machine, as processes."""
    from maitred.fleet.launch import LocalLauncher

    if several is not None:
        named = {model.name: model.words for model in several.models}
        return lambda on_event: LocalLauncher((), token=token, on_event=on_event, named=named)
    if given.plan is None:
        return lambda on_event: LocalLauncher(words, token=token, on_event=on_event)
    plan = read_plan(given.plan)
    words = words or ((plan.model,) if plan.model else ())
    return lambda on_event: LocalLauncher(words, token=token, on_event=on_event, kinds=plan.plans[0].replicas)


def _ray(words: tuple[str, ...], token: str, given: RouteOptions, several: ModelSet | None) -> MakeLauncher:
    """Replicas on the nodes of a Ray cluster, as actors. Raises ConfigError without the extra `ray`."""
    if several is not None:
        raise ConfigError("several models share the memory of this machine; leave --launch ray out, or --models")
    from maitred.fleet.ray_backend import RayLauncher

    num_shared = max(1, Bounds.parse(given.replicas or "1").low)  # those that are always there are placed together
    return lambda on_event: RayLauncher(
        words, token=token, on_event=on_event, placement=given.placement, num_shared=num_shared
    )


MakeMakeLauncher = Callable[[tuple[str, ...], str, "RouteOptions", "ModelSet | None"], "MakeLauncher"]
LAUNCHERS: dict[str, MakeMakeLauncher] = {"local": _local, "ray": _ray}
"""Given the words of `maitred serve` and the fleet's secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """Where the replicas are."""

    urls: tuple[str, ...] = option((), name="--url", metavar="URL[=WEIGHT]")
    """A replica: http://HOST:PORT or https://HOST:PORT, any server that speaks OpenAI's API; or dns://NAME:PORT, all
    addresses of a name, looked up every few seconds. =WEIGHT is its speed beside the others', where it tells none."""
    replicas: str | None = option(None, metavar="N|MIN:MAX")
    """So many replicas of the router's own, or from MIN to MAX as there is need: `maitred serve` with what follows
    `--`, its default model where nothing does. MIN 0 lets the last one stop."""
    plan: str | None = option(None, metavar="FILE")
    """Start the best layout of `maitred plan --json FILE` on this machine as replicas of the router's own, each with
    its limits and its role. What follows `--` is the model, where the plan's is a name that cannot be served."""
    launch: str = option("local", choices=tuple(LAUNCHERS))
    """Where they are started: local is this machine, ray the nodes of a Ray cluster."""
    placement: str = option("pack", choices=PLACEMENTS)
    """With ray: pack puts the first MIN replicas on as few nodes as hold them, spread on as many as there are."""
    idle_s: float = 300.0
    """With MIN 0: the last replica stops after so long (s) without a request."""
    handover: str = option("auto", choices=HANDOVERS)
    """Among replicas that give their KV (serve --kv-listen): whether a prompt is computed by another one than its
    answer. auto does as foretold from queues, free blocks and what steps and transfers take; always; never."""
    reuse_port: bool = False
    """Listen beside other routers on the same port; a new one takes over when the old one ends."""

    def __post_init__(self) -> None:
        choices = {"launch": LAUNCHERS, "placement": PLACEMENTS, "handover": HANDOVERS}
        for name, names in choices.items():
            if (value := getattr(self, name)) not in names:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(names)}")
        if self.replicas is not None and (self.urls or self.reuse_port):
            raise ConfigError(
                "replicas end with the router that launched them, so it has neither URLs nor reuse_port beside them"
            )
        if self.replicas is not None:
            Bounds.parse(self.replicas)


def _run(options: Options) -> int:
    return run_router(options)


def run_router(
    options: Options, more: Iterable[Route] = (), opened: Callable[[Router, str], None] = lambda router, url: None
) -> int:
    """Route until a signal comes; the exit code. `more` routes are beside the router's own; `opened` is told the URL in
    the event loop.
    """
    from maitred.api.http.fleet_headers import FleetToken, read_fleet_token
    from maitred.engine.limits import claim_descriptors

    given, server = options[RouteOptions], options[ServerConfig]
    if given.plan is not None:
        options = _planned(options, given.plan)
        given = options[RouteOptions]
    _check(options)
    several = _several(options)
    launches = given.replicas is not None or several is not None
    targets = () if launches else targets_of(given.urls)
    token = read_fleet_token(server.fleet_token_file)
    if launches and not token.is_set:
        token = FleetToken(secrets.token_hex(32).encode())
    launch = _launcher(options, token, several) if launches else None
    claim_descriptors()
    listener = bind(server.host, server.port, reuse_port=given.reuse_port)
    tell = teller(server)
    with listener, open_tenancy(options[TenancyConfig], server) as (tenants, ledger):
        ending = noted()
        if ending.came:
            return 0
        from maitred.api.route.routes import route

        router = _router(options, targets, token, launch, several, tenants, ledger)

        def on_open(host: str, port: int) -> None:
            spare_the_collector()
            url = url_of(server, host, port)
            tell(f"maitred routes to {_listed(given, several)} on {url}")
            opened(router, url)

        listen(listener, server.host, server.port)
        route(router, listener, more=more, is_ending=lambda: ending.came, on_open=on_open)
    return 0


def _planned(options: Options, path: str) -> Options:
    """Options with the replicas and the hand-over of a plan's best layout. Raises UsageError, ConfigError."""
    given, best = options[RouteOptions], read_plan(path).plans[0]
    for name in ("replicas", "launch", "urls"):
        if options.was_given(name):
            raise UsageError(f"--plan says which replicas there are, and starts them here; drop --{name}")
    handover = given.handover if options.was_given("handover") else best.handover
    return options.with_part(replace(given, replicas=str(len(best.replicas)), handover=handover))


def route_several(options: Options) -> int:
    """`maitred serve --models`: as `maitred route`, which takes its own flags; the others are for each model."""
    from maitred.cli import serve
    from maitred.cli.several import given_words

    if options.was_given("model"):
        raise UsageError("--models names the models; drop MODEL, or write it into the file")
    known, words, after = {flag.field for flag in COMMAND.flags()}, list[str](), list[str]()
    for part in serve.COMMAND.parts:
        for flag in filter(lambda flag: options.was_given(flag.field), flags_of(part)):
            given = given_words(flag, getattr(options[part], flag.field))
            is_replicas = flag.field not in known or flag.field in _OF_REPLICAS
            words += [] if is_replicas else given
            after += given if is_replicas or part is SchedulerConfig else []
    return run_router(COMMAND.parse([*words, "--", *after]))


def _several(options: Options) -> ModelSet | None:
    """Several models, where a file or a folder names them. Raises UsageError, ConfigError."""
    asked, given = options[SeveralOptions], options[RouteOptions]
    if not asked.are_given:
        return None
    if given.urls or given.replicas is not None or given.reuse_port:
        raise UsageError(
            "--models starts a replica for each model that is loaded; drop URLs, --replicas and --reuse-port"
        )
    from maitred.cli.several import read_several

    tell = teller(options[ServerConfig])
    return read_several(asked.models, asked.models_dir, asked.models_memory_bytes, options.after_dashes, tell)


def _launcher(options: Options, token: FleetToken, several: ModelSet | None) -> MakeLauncher:
    """Launcher of the router's own replicas. Raises ConfigError where there can be none."""
    given = options[RouteOptions]
    ((_, secret),) = token.shown()
    return LAUNCHERS[given.launch](options.after_dashes, secret.decode(), given, several)


def _router(
    options: Options,
    targets: tuple[RouteTarget, ...],
    token: FleetToken,
    launch: MakeLauncher | None,
    several: ModelSet | None,
    tenants: TenantFile | None,
    ledger: Ledger | None,
) -> Router:
    from maitred.api.http.auth import Authenticator
    from maitred.api.route.router import Router

    given, server = options[RouteOptions], options[ServerConfig]
    objective_s = options[AdmissionConfig].ttft_objective_s
    spent = ledger.spent_tokens() if ledger is not None else None
    return Router(
        server,
        options[FleetConfig],
        options[SchedulerConfig],
        targets,
        admission=options[AdmissionConfig],
        token=token,
        authenticator=Authenticator(server.api_keys, tenants, spent),
        shared=options[SharedConfig],
        autoscale=Autoscaler(AutoscaleConfig(idle_s=given.idle_s, ttft_objective_s=objective_s)),
        launch=launch,
        handover=HandoverConfig(handover=given.handover, **promised(server.slo)),
        bounds=Bounds.parse(given.replicas) if given.replicas is not None else None,
        ledger=ledger,
        several=several,
    )


def _check(options: Options) -> None:
    """Raises UsageError for flags that mean nothing here."""
    launches = options[RouteOptions].replicas is not None or options[SeveralOptions].are_given
    for field in _OF_REPLICAS:
        if options.was_given(field):
            where = "put it behind --" if launches else "give it to `maitred serve`"
            raise UsageError(f"{field.replace('_', '-')} is a setting of replicas; {where}")
    given = ["what follows --"] if options.after_dashes else []
    given += [f"--{field.replace('_', '-')}" for field in _OF_LAUNCHED if options.was_given(field)]
    if given and not launches:
        raise UsageError(f"{given[0]} is for replicas that the router launches; add --replicas N, or --models FILE")


def targets_of(urls: tuple[str, ...]) -> tuple[RouteTarget, ...]:
    """Raises ConfigError for none, for a wrong one, and for one that is there twice."""
    if not urls:
        raise UsageError("a router needs a replica: maitred route http://HOST:PORT ..., or --replicas N to launch some")
    targets = tuple(parse_target(url) for url in urls)
    for at, target in enumerate(targets):
        if any(target.origin == before.origin for before in targets[:at]):
            raise ConfigError(f"{target.origin.url} is given twice; give it a weight instead: {target.origin.url}=2")
    return targets


def _listed(given: RouteOptions, several: ModelSet | None) -> str:
    if several is not None:
        return f"{len(several.models)} models ({', '.join(model.name for model in several.models)})"
    if given.replicas is not None:
        return f"{given.replicas} replica{'' if given.replicas == '1' else 's'} of its own"
    return given.urls[0] if len(given.urls) == 1 else f"{len(given.urls)} addresses"


COMMAND = Command(
    path="route",
    summary="One address for many servers: holds requests until one has room, and sends each where its prefix is.",
    run=_run,
    parts=(
        RouteOptions,
        SeveralOptions,
        FleetConfig,
        ServerConfig,
        SchedulerConfig,
        AdmissionConfig,
        TenancyConfig,
        SharedConfig,
    ),
    positional="urls",
    after_dashes="WORD OF maitred serve ...",
    first=(
        "urls",
        "replicas",
        "host",
        "port",
        "balance",
        "policy",
        "tenants",
        "ledger",
        "fleet_token_file",
        "api_keys",
    ),
    examples=(
        "maitred route http://10.0.0.1:8000 http://10.0.0.2:8000",
        "maitred route http://fast:8000=2 http://slow:8000 --balance least_load",
        "maitred route --replicas 0:4 -- ./Llama-3.2-1B --max-num-seqs 32",
        "maitred route --models models.yaml --models-memory-bytes 12GiB -- --max-num-seqs 8",
        "maitred route dns://replicas.default.svc:8000 --tenants tenants.yaml --fleet-token-file token",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The demonstration"""

    model: str | None = option(None, metavar="MODEL")
    """Model that the workers serve; unset is the built-in one, which three of have room anywhere."""
    host: str = "127.0.0.1"
    """Address that the router listens on."""
    port: int = 8000
    """Port that the router listens on; 0 is a free one."""


DEMO = Command(
    path="demo",
    summary="Show a fleet at work: a router, one prefill and two decode workers, three tenants, buttons that strike.",
    run=deferred("maitred.cli.demo:run_demo"),
    parts=(DemoOptions,),
    positional="model",
    examples=("maitred demo", "maitred demo smollm2 --port 8080"),
)
