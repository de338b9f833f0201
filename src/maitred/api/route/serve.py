"""Listens for a router: the same server, connections, limits and end as `serve` has."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket

from maitred.api.http.asgi import AsgiApp
from maitred.api.http.logs import configure_logging
from maitred.api.http.server import HttpServer
from maitred.api.route.router import Router
from maitred.api.route.routes import ROUTES
from maitred.core.errors import ConfigError


def make_server(
    router: Router,
    *,
    is_ending: Callable[[], bool] = lambda: False,
    on_open: Callable[[str, int], None] = lambda host, port: None,
) -> HttpServer:
    """`on_open` is told host and port once requests are welcome; the search for replicas begins then."""

    def opened(host: str, port: int) -> None:
        router.start()
        on_open(host, port)

    def give_up(cause: str) -> None:
        server.failure, server.should_exit = ConfigError(cause), True

    server = HttpServer(AsgiApp(router, ROUTES), router.config, is_ending=is_ending, on_open=opened)
    router.give_up = give_up
    return server


def route(
    router: Router,
    listener: socket | None = None,
    *,
    is_ending: Callable[[], bool] = lambda: False,
    on_open: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is in flight and return. `listener` is a bound socket. Raises why
    no replica can be started.
    """
    router.metrics.num_log_lines_dropped = configure_logging(router.config)
    server = make_server(router, is_ending=is_ending, on_open=on_open)
    server.run([listener] if listener is not None else None)
    if server.failure is not None:
        raise server.failure
