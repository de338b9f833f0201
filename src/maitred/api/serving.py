"""A server put together: routes, what they need, and the connections around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from socket import socket
from typing import TYPE_CHECKING

from maitred.api.common_routes import resume_batches
from maitred.api.http.app import App
from maitred.api.http.asgi import AsgiApp
from maitred.api.http.auth import Authenticator
from maitred.api.http.logs import configure_logging
from maitred.api.http.routes import Route, RouteTable
from maitred.api.http.server import BesideServer, HttpServer
from maitred.api.ops.observer import Observer
from maitred.api.routes import make_routes
from maitred.config import ServerConfig
from maitred.core.clock import Clock, WallClock
from maitred.engine.intake import ServedModel
from maitred.engine.limits import hand_over_quickly
from maitred.engine.replica import Replica
from maitred.engine.starting import Engine, StartingEngine
from maitred.gate.admission import AdmissionController
from maitred.storage.capture import Capture
from maitred.storage.ledger import Ledger

if TYPE_CHECKING:
    from maitred.storage.key_files import TenantFile


def create_app(
    replica: Replica,
    model: ServedModel,
    config: ServerConfig,
    *,
    clock: Clock | None = None,
    is_ready: Callable[[], bool] | None = None,
    policy: str | None = None,
    tenants: TenantFile | None = None,
    ledger: Ledger | None = None,
    capture: Capture | None = None,
    admission: AdmissionController | None = None,
    start_phases: Mapping[str, float] | None = None,
    routes: RouteTable | None = None,
) -> AsgiApp:
    """The ASGI application that serves `model` on `replica`; needs no lifespan.

    `is_ready` tells whether requests are welcome (besides the replica being alive). `policy` is the scheduler's: where
    it heeds no priority, a request with one is refused; None heeds them. `clock` must be the engine's. With `tenants`,
    only their keys are taken; `ledger` is read for administrators, and `capture` keeps answers of tenants that let it.
    `admission` is the engine's, which turns away more than it can serve in time; `None` turns nothing away.
    `start_phases` go to the metrics page. `routes` None are all there are.
    """
    clock = clock or WallClock()
    app = _loading_app(config, clock, tenants, ledger, capture, start_phases, policy=policy, is_ready=is_ready)
    app.open(replica, model, admission)
    return AsgiApp(app, routes or make_routes())


def serve(
    starting: StartingEngine,
    config: ServerConfig,
    listener: socket | None = None,
    *,
    policy: str | None = None,
    tenants: TenantFile | None = None,
    ledger: Ledger | None = None,
    capture: Capture | None = None,
    start_phases: Mapping[str, float] | None = None,
    salt_secret: bytes | None = None,
    is_ending: Callable[[], bool] = lambda: False,
    on_open: Callable[[Engine, str, int], None] | None = None,
    more: Sequence[Route] = (),
    front: Callable[[App, RouteTable], AsgiApp] = AsgiApp,
    beside: Callable[[App], BesideServer] | None = None,
) -> None:
    """Listen while the engine loads, and serve until SIGTERM or SIGINT; then finish what is in flight and return.

    `listener` is a bound socket; without one, `config` says where. `on_open` is told the engine, host and port when
    requests are welcome. `salt_secret` keeps tenants' cached prefixes apart, those that outlive the process too; None
    is drawn for this process alone. `more` routes are of what is served besides, `front` makes the application, and
    `beside` the server of another protocol. `is_ending` tells whether a signal came before they are heard here. Raises
    what keeps the engine from loading.
    """
    num_log_lines_dropped = configure_logging(config)
    hand_over_quickly()
    app = _loading_app(
        config, WallClock(), tenants, ledger, capture, start_phases, policy=policy, salt_secret=salt_secret
    )
    app.observer.metrics.num_log_lines_dropped = num_log_lines_dropped

    def opened(host: str, port: int) -> None:
        if on_open is not None and server.engine is not None:
            on_open(server.engine, host, port)
        resume_batches(app)

    asgi = front(app, make_routes(more))
    other = beside(app) if beside is not None else None
    server = HttpServer(asgi, config, starting=starting, is_ending=is_ending, on_open=opened, beside=other)
    server.run([listener] if listener is not None else None)
    if server.failure is not None:
        raise server.failure


def _loading_app(
    config: ServerConfig,
    clock: Clock,
    tenants: TenantFile | None,
    ledger: Ledger | None,
    capture: Capture | None,
    start_phases: Mapping[str, float] | None,
    *,
    policy: str | None,
    is_ready: Callable[[], bool] | None = None,
    salt_secret: bytes | None = None,
) -> App:
    spent_tokens = ledger.spent_tokens() if ledger is not None else None
    authenticator = Authenticator(config.api_keys, tenants, spent_tokens)
    failures = authenticator.num_file_failures
    observer = Observer(config, clock, start_phases=start_phases, num_tenants_file_failures=failures)
    app = App(
        config,
        clock=clock,
        observer=observer,
        authenticator=authenticator,
        policy=policy,
        is_ready=is_ready,
        ledger=ledger,
        capture=capture,
        salt_secret=salt_secret,
    )
    if config.result_cache_semantic is not None:
        from maitred.api.http.similar import SimilarPrompts  # noqa: PLC0415  numpy

        SimilarPrompts(app)
    return app
