"""`maitred route URL ...`: one address for many replicas."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.ending import noted
from maitred.cli.flags import UsageError, option
from maitred.cli.serve.command import bind, listen, spare_the_collector, teller, url_of
from maitred.cli.serve.tenancy import open_tenancy
from maitred.cluster.config import FleetConfig
from maitred.cluster.origins import Target, parse_target
from maitred.config import AdmissionConfig, SchedulerConfig, ServerConfig, SharedConfig, TenancyConfig
from maitred.errors import ConfigError

_OF_REPLICAS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "served_model_names",
    "default_max_n",
    "decode_timeout_s",
    "start_budget_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """Where the replicas are."""

    urls: tuple[str, ...] = option((), name="--url", metavar="URL[=WEIGHT]")
    """A replica: http://HOST:PORT or https://HOST:PORT, any server that speaks OpenAI's API; or dns://NAME:PORT, all
    addresses of a name, looked up every few seconds. =WEIGHT is its speed beside the others', where it tells none."""
    reuse_port: bool = False
    """Listen beside other routers on the same port; a new one takes over when the old one ends."""


def _run(options: Options) -> int:
    from maitred.api.http.fleet_token import read_fleet_token
    from maitred.engine.limits import claim_descriptors

    given, server = options[RouteOptions], options[ServerConfig]
    for field in _OF_REPLICAS:
        if options.was_given(field):
            raise UsageError(f"{field.replace('_', '-')} is a setting of replicas; give it to `maitred serve`")
    targets = targets_of(given.urls)
    token = read_fleet_token(server.fleet_token_file)
    claim_descriptors()
    listener = bind(server.host, server.port, reuse_port=given.reuse_port)
    tell = teller(server)
    with listener, open_tenancy(options[TenancyConfig], server) as (tenants, ledger):
        ending = noted()
        if ending.came:
            return 0
        from maitred.api.http.auth import Authenticator
        from maitred.api.route.router import Router
        from maitred.api.route.serve import route

        spent = ledger.spent_tokens() if ledger is not None else None
        router = Router(
            server,
            options[FleetConfig],
            options[SchedulerConfig],
            targets,
            admission=options[AdmissionConfig],
            token=token,
            authenticator=Authenticator(server.api_keys, tenants, spent),
            shared=options[SharedConfig],
            ledger=ledger,
        )

        def on_open(host: str, port: int) -> None:
            spare_the_collector()
            tell(f"maitred routes to {_listed(given.urls)} on {url_of(server, host, port)}")

        listen(listener, server.host, server.port)
        route(router, listener, is_ending=lambda: ending.came, on_open=on_open)
    return 0


def targets_of(urls: tuple[str, ...]) -> tuple[Target, ...]:
    """Raises ConfigError for none, for a wrong one, and for one that is there twice."""
    if not urls:
        raise UsageError("a router needs a replica: maitred route http://HOST:PORT ...")
    targets = tuple(parse_target(url) for url in urls)
    for at, target in enumerate(targets):
        if any(target.origin == before.origin for before in targets[:at]):
            raise ConfigError(f"{target.origin.url} is given twice; give it a weight instead: {target.origin.url}=2")
    return targets


def _listed(urls: tuple[str, ...]) -> str:
    return urls[0] if len(urls) == 1 else f"{len(urls)} addresses"


COMMAND = Command(
    path="route",
    summary="One address for many servers: holds requests until one has room, and sends each where its prefix is.",
    run=_run,
    parts=(RouteOptions, FleetConfig, ServerConfig, SchedulerConfig, AdmissionConfig, TenancyConfig, SharedConfig),
    positional="urls",
    first=("urls", "host", "port", "balance", "policy", "tenants", "ledger", "fleet_token_file", "api_keys"),
    examples=(
        "maitred route http://10.0.0.1:8000 http://10.0.0.2:8000",
        "maitred route http://fast:8000=2 http://slow:8000 --balance least_load",
        "maitred route dns://replicas.default.svc:8000 --tenants tenants.yaml --fleet-token-file token",
    ),
)
