"""Opens the files that `serve --tenants` and `--ledger` name, and hears SIGHUP."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maitred.cli.command import Command, Options, deferred
from maitred.cli.console import inert, note
from maitred.cli.flags import UsageError
from maitred.cli.local import ENGINE_PARTS, engine_config
from maitred.cli.main import noted
from maitred.config import (
    NO_MODEL,
    AdmissionConfig,
    CacheConfig,
    EngineConfig,
    MachineShare,
    ModelConfig,
    ProcessConfig,
    ServerConfig,
    TensorConfig,
)
from maitred.config.field_checks import host_and_port, require_at_least
from maitred.core.errors import ConfigError

if TYPE_CHECKING:
    from socket import socket

    from maitred.api.http.fleet_headers import FleetToken
    from maitred.api.releases import Releases
    from maitred.core.tensor_request import IndexEntry
    from maitred.engine.live_requests import LiveRequest
    from maitred.engine.replica import Replica
    from maitred.engine.starting import Engine, StartingEngine
    from maitred.model.shelf import Shelf
    from maitred.storage.capture import Capture
    from maitred.storage.key_files import TenantFile
    from maitred.storage.ledger import Ledger
    from maitred.tenancy.tenant import TenantTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TenancyConfig:
    """Tenants: who may ask, and what is recorded of it."""

    tenants: str | None = None
    """YAML file with tenants, their limits and hashed keys, in force as soon as it changes; None knows no tenants."""
    ledger: str | None = None
    """SQLite file with a row for each request: tenant, key, tokens, how it ended; None keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfConfig:
    """Versions: MODEL may be a shelf that maitred publish made."""

    trust_key: str | None = None
    """Public key in PEM: versions of the shelf are served only if its owner signed them; None takes all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """Captured traffic, for tools that learn from it; of tenants with `capture: asked` or `always` alone."""

    capture: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder for the token ids of prompts and answers; only its owner may read it. None keeps none."""
    capture_max_bytes: int = 256 * 2**20
    """Most bytes of the folder; the oldest answers go."""

    def __post_init__(self) -> None:
        require_at_least("capture_max_bytes", self.capture_max_bytes, 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralOptions:
    """Several models behind one address, loaded for requests and put out when others need the memory"""

    models: str | None = field(default=None, metadata={"metavar": "FILE"})
    """YAML file `models: {NAME: {model, aliases, pinned, keep_alive_s, dtype, ...}}`, each with any key of a config
    file of `maitred serve`; the policy orders the swaps."""
    models_dir: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Folder in which each GGUF file, and each folder with a model, is a model by its name; besides those of FILE."""
    models_memory_bytes: int | None = None
    """Memory for weights and KV of all models that are loaded at a time; None is 80% of what is available."""

    @property
    def are_given(self) -> bool:
        return self.models is not None or self.models_dir is not None


@contextmanager
def _open_capture(config: CaptureConfig, tenancy: TenancyConfig, server: ServerConfig) -> Iterator[Capture | None]:
    if config.capture is None:
        yield None
        return
    if tenancy.tenants is None and server.fleet_token_file is None:
        raise ConfigError(
            "--capture keeps answers of tenants that let it, and there are none; add --tenants FILE, and to a tenant "
            "in it: capture: asked, or always"
        )
    from maitred.storage.capture import Capture

    capture = Capture(Path(config.capture).expanduser(), config.capture_max_bytes)
    try:
        yield capture
    finally:
        capture.close()


@contextmanager
def open_tenancy(config: TenancyConfig, server: ServerConfig) -> Iterator[tuple[TenantFile | None, Ledger | None]]:
    """Both files, watched and written until the block ends. Raises ConfigError."""
    if config.tenants is not None and server.api_keys:
        raise ConfigError(
            "--tenants and --api-key (or MAITRED_API_KEY) exclude each other: such a key would pass all limits; "
            "make one for a tenant with: maitred keys create"
        )
    with ExitStack() as stack:
        ledger, tenants = None, None
        if config.ledger is not None:
            from maitred.storage.ledger import Ledger

            ledger = Ledger(Path(config.ledger))
            stack.callback(ledger.close)
        if config.tenants is not None:
            from maitred.storage.key_files import TenantFile

            accept = _refuse_budgets if ledger is None else lambda table: None
            tenants = TenantFile(Path(config.tenants), accept=accept)
            stack.callback(tenants.close)
            _reload_at_hangup(tenants, stack)
        yield tenants, ledger


def _refuse_budgets(table: TenantTable) -> None:
    for tenant in table.tenants.values():
        if tenant.limits.token_budget is not None:
            raise ConfigError(
                f"tenant {tenant.name!r} has a token_budget, and only a ledger remembers what was used; "
                "add --ledger FILE"
            )


def _reload_at_hangup(tenants: TenantFile, stack: ExitStack) -> None:
    before = signal.signal(signal.SIGHUP, lambda number, frame: tenants.reload())
    stack.callback(signal.signal, signal.SIGHUP, before)


MOST_NAMED = 6  # tensor models in the line that says what is served


def _run(options: Options) -> int:
    if not options[SeveralOptions].are_given:
        return _serve(options)
    return deferred("maitred.cli.route:route_several")(options)


def _serve(options: Options) -> int:
    import logging

    from maitred.api.http.fleet_headers import read_fleet_token
    from maitred.core.clock import WallClock
    from maitred.engine.limits import SPARE_DESCRIPTORS, check_addresses, claim_descriptors
    from maitred.engine.timeline import Timeline, process_age_s

    timeline = Timeline(WallClock(), age_s=process_age_s())
    server = options[ServerConfig]
    launcher = Announcer(server.announce_fd)
    num_descriptors = claim_descriptors()
    check_addresses()
    listener = bind(server.host, server.port)  # first, so that a busy port costs no loading time
    tell = teller(server)
    if 0 <= num_descriptors - SPARE_DESCRIPTORS < server.max_connections:
        tell(f"connections  fewer than {num_descriptors - SPARE_DESCRIPTORS:,}, for want of descriptors (ulimit -n)")
    with (
        listener,
        open_tenancy(options[TenancyConfig], server) as (tenants, ledger),
        _open_capture(options[CaptureConfig], options[TenancyConfig], server) as capture,
    ):
        token = read_fleet_token(server.fleet_token_file)
        share = kv_share(options[ProcessConfig].kv_listen, options[CacheConfig], token)
        server, config = _share_results(server, replace(served_config(options), share=share))
        ending = noted()
        if ending.came:
            return 0
        keeps = config.tiers.kv_disk if not share.exchanges_kv else None  # else tenants' salts are the fleet's
        secret = _salt_secret(keeps) if keeps is not None else None
        timeline.end("command")
        starting, releases = _start(options, config, tell, ledger.opened if ledger is not None else None)
        try:
            from maitred.api.serving import serve  # while the engine's process loads

            def on_open(engine: Engine, host: str, port: int) -> None:
                if ledger is not None:
                    ledger.model = engine.model.name
                timeline.end_nested(engine.start_phases, "server")
                tell(timeline.describe())
                if slow := timeline.over(server.start_budget_s):
                    logging.getLogger("maitred.start").warning(slow)
                has_keys = bool(server.api_keys or tenants)
                tensors = engine.replica.tensors
                served = served_words(engine.model.names, tensors.index() if tensors is not None else ())
                tell(_welcome(served, url_of(server, host, port), has_keys=has_keys, talks=bool(engine.model.names)))
                spare_the_collector()
                held = engine.model.footprint
                launcher.loaded(timeline.phases, 0 if held is None else held.weights_bytes + held.kv_bytes)
                if releases is not None:
                    releases.follow()

            listen(listener, server.host, server.port)
            launcher.listening(url_of(server, *listener.getsockname()[:2]))
            serve(
                starting,
                server,
                listener,
                policy=config.scheduler.policy,
                tenants=tenants,
                ledger=ledger,
                capture=capture,
                start_phases=timeline.phases,
                salt_secret=secret,
                is_ending=lambda: ending.came,
                on_open=on_open,
                **(
                    _tensor_protocols(options)
                    if releases is None
                    else {"more": releases.routes, "front": releases.front}
                ),
            )
        finally:
            starting.stop()
            if releases is not None:
                releases.stop()
    return 0


def _start(
    options: Options,
    config: EngineConfig,
    tell: Callable[[str], None],
    on_admitted: Callable[[LiveRequest], None] | None,
) -> tuple[StartingEngine, Releases | None]:
    """The engine on its way, in a process of its own unless the user wants one process; and what follows a shelf."""
    import logging

    from maitred.engine.starting import StartingEngine
    from maitred.engine.supervisor import Start

    process = options[ProcessConfig]
    start = Start(
        config=config,
        process=process,
        served_model_names=options[ServerConfig].served_model_names,
        log_level=logging.getLogger().level,
    )
    if process.in_process:
        from maitred.engine.build import load_engine
        from maitred.engine.engine_thread import in_thread

        start = replace(start, open=in_thread(load_engine))
    if config.tensors.serves:
        from maitred.tensor.host import serving_tensors

        start = serving_tensors(start)
    shelf, make = _shelf(options), _replica_of(options)
    if shelf is None:
        return StartingEngine(start, on_event=tell, on_admitted=on_admitted, make=make), None
    from maitred.engine.memory import available_memory_bytes
    from maitred.engine.releases import StartingRelease

    share = replace(config.share, available_bytes=available_memory_bytes())
    start = replace(start, config=replace(config, share=share))
    seen, begin = shelf.current(), partial(StartingRelease, shelf, start, on_admitted=on_admitted, make=make)
    starting = begin(shelf.verify(seen[0]), on_event=tell)
    from maitred.api.releases import Releases  # while the engine's process loads

    return starting, Releases(shelf, seen, begin)


def _shelf(options: Options) -> Shelf | None:
    """The shelf that MODEL is; None where it is a model. Raises ConfigError for what cannot follow one."""
    model, key, process = options[ModelConfig].model, options[ShelfConfig].trust_key, options[ProcessConfig]
    if model is None or not (Path(model).expanduser() / "current").is_symlink():
        if key is not None:
            raise ConfigError(f"trust_key is for a shelf of versions, and {model} is none; make one: maitred publish")
        return None
    why = "while a shelf's version changes, two engines serve, each in a process of its own"
    if _tensors(options).serves:
        raise ConfigError(
            f"model_repository is not for a shelf: {why}, and tensor models would lose sequences and regions; serve "
            f"them alone (maitred serve none --model-repository DIR --port N), and both with maitred route URL URL"
        )
    if process.in_process:
        raise ConfigError(f"in_process is not for a shelf: {why}; leave it out, or serve {model}/current")
    if process.kv_listen is not None:
        raise ConfigError(f"kv_listen is one port, and {why}; leave it out, or serve {model}/current")
    from maitred.model.shelf import Shelf

    return Shelf(Path(model).expanduser(), Path(key) if key is not None else None)


def _share_results(server: ServerConfig, config: EngineConfig) -> tuple[ServerConfig, EngineConfig]:
    """One budget for answers: the server keeps a language model's, the engine tensor models', half each of both."""
    if config.tensors.model_repository is None:
        return server, config
    mine = 0 if config.model.model == NO_MODEL else server.result_cache_bytes // 2
    theirs, ttl_s = server.result_cache_bytes - mine, server.result_cache_ttl_s
    share = replace(config.share, result_cache_bytes=theirs, result_cache_ttl_s=ttl_s)
    return replace(server, result_cache_bytes=mine), replace(config, share=share)


def _tensor_protocols(options: Options) -> dict[str, Any]:
    """Protocols that `serve` answers besides, where there are tensor models."""
    tensors, grpc_port = options[TensorConfig], options[ServerConfig].grpc_port
    if not tensors.serves:
        if grpc_port is not None:
            raise ConfigError("grpc_port is for tensor models; give --model-repository")
        return {}
    from maitred.api.dialects.kserve.routes import kserve_routes
    from maitred.api.dialects.openai.embeddings import embedding_routes
    from maitred.api.dialects.tfserving.routes import ROUTES
    from maitred.api.tensor.extensions import Extensions, Labels

    repository = Path(tensors.model_repository) if tensors.model_repository is not None else None
    extensions = Extensions(options[ServerConfig].server_id, Labels(repository))
    more = (*ROUTES, *kserve_routes(extensions), *embedding_routes())
    if grpc_port is None:
        return {"more": more}
    from maitred.api.grpc.server import grpc_server

    return {"more": more, "beside": partial(grpc_server, extensions)}


def _replica_of(options: Options) -> Callable[..., Replica]:
    if _tensors(options).serves:
        if len(options[ProcessConfig].roles) > 1:
            raise ConfigError("a model_repository is served by one engine; leave out workers, or the repository")
    elif options[ModelConfig].model == NO_MODEL:
        raise UsageError("none is no model; give --model-repository too, or leave out none for the built-in model")
    if len(options[ProcessConfig].roles) == 1:
        from maitred.engine.client import EngineClient

        return EngineClient
    from maitred.fleet.workers import Workers

    return partial(Workers, slo=options[ServerConfig].slo)


def served_config(options: Options) -> EngineConfig:
    """Tenants have tiers, so where there are tenants the policy heeds them, unless the user chose one."""
    config = replace(engine_config(options), admission=options[AdmissionConfig], tensors=_tensors(options))
    if _is_onnx(config.model.model):
        config = replace(config, model=replace(config.model, model=NO_MODEL))
    if options[TenancyConfig].tenants is None or options.was_given("policy"):
        return config
    return replace(config, scheduler=replace(config.scheduler, policy="interactive"))


def _is_onnx(model: str | None) -> bool:
    """One tensor model, given in the language model's place."""
    return model is not None and model.endswith(".onnx")


def _tensors(options: Options) -> TensorConfig:
    model, tensors = options[ModelConfig].model, options[TensorConfig]
    if not _is_onnx(model):
        return tensors
    if tensors.model_repository is not None:
        raise ConfigError("an .onnx file and a model_repository are two; put the file into the repository")
    return replace(tensors, model_repository=model)


def kv_share(listen: str | None, cache: CacheConfig, token: FleetToken) -> MachineShare:
    """The engine's share for `--kv-listen`, as a worker of several hosts; checked before anything loads. Raises
    ConfigError for an address from which no other server could pull.
    """
    if listen is None:
        return MachineShare()
    if not token.is_set:
        raise ConfigError(
            f"kv_listen is {listen}, and nobody proves that he may pull from there; give the servers and their router "
            "the same --fleet-token-file"
        )
    if cache.kv_transport == "shm":
        raise ConfigError("kv_transport is shm, which ends at this machine; leave it at auto, or kv_listen out")
    if not cache.enable_prefix_caching:
        raise ConfigError("kv_listen gives what the prefix cache finds; leave enable_prefix_caching on, or it out")
    from maitred.kv.transports import listen_tcp

    listen_tcp(*host_and_port("kv_listen", listen), has_token=True).close()  # a slip costs no loading time
    ((_, secret),) = token.shown()
    return MachineShare(exchanges_kv=True, kv_listen=listen, kv_token=secret)


def _salt_secret(folder: str) -> bytes:
    from maitred.kv.disk import salt_secret  # numpy

    return salt_secret(folder)


def spare_the_collector() -> None:
    """Exempt what was loaded from garbage collection: else each full one walks all of it between two steps."""
    import gc

    gc.freeze()  # without a collection before: imports leave next to nothing, and looking for it takes 50 ms


def teller(server: ServerConfig) -> Callable[[str], None]:
    """Start-up lines: plain for a person, log entries where the log is JSON."""
    import logging

    from maitred.api.http.logs import configure_logging

    configure_logging(server)
    if server.log_format == "json":
        return logging.getLogger("maitred.start").info
    return note if server.log_level in ("debug", "info") else lambda line: None


def url_of(server: ServerConfig, host: str, port: int) -> str:
    """The server's URL as a client on this machine writes it."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{'https' if server.ssl_certfile is not None else 'http'}://{shown}:{port}"


def served_words(names: Sequence[str], tensors: Iterable[IndexEntry]) -> str:
    """The language model, and tensor models by name; versions that are not ready are counted."""
    entries = list(tensors)
    ready = [*dict.fromkeys(each.name for each in entries if each.state is not None and each.state.value == "READY")]
    told = [names[0]] if names else []
    if ready or not names:
        more = f", and {len(ready) - MOST_NAMED} more" if len(ready) > MOST_NAMED else ""
        listed = f" ({inert(', '.join(ready[:MOST_NAMED]))}{more})" if ready else ""
        told.append(f"{len(ready)} tensor model{'' if len(ready) == 1 else 's'}{listed}")
    failed = sum(each.state is not None and each.state.value == "UNAVAILABLE" for each in entries)
    return " and ".join(told) + (f", {failed} unavailable (maitred ps says why)," if failed else "")


def _welcome(served: str, url: str, *, has_keys: bool, talks: bool = True) -> str:
    """A line with what is served where, and the next thing to type."""
    key = " --api-key KEY" if has_keys else ""
    command = f"maitred chat --url {url}" if talks else f"maitred ps {url}"
    return f"maitred serves {served} on {url}   (open it in a browser, or try: {command}{key})"


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket:
    """A bound socket that does not listen yet: until `listen`, clients are refused, not kept waiting.

    With `reuse_port` others may be bound to the same port, if they all say so.
    """
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        text = f"host is {host!r}: {error.strerror}; use 127.0.0.1, or 0.0.0.0 for every interface"
        raise ConfigError(text) from None
    listener = socket.socket(family, kind, protocol)
    try:
        if port:  # a free port needs none of it, and two that look for one at once must not find the same
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from None
    return listener


def listen(listener: socket, host: str, port: int) -> None:
    """Accept clients from now on. Raises ConfigError when another server was faster."""
    try:
        listener.listen()
    except OSError as error:
        raise ConfigError(_cannot_listen(host, port, error)) from None


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop the other server, or choose a free one with --port 0"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023, such as --port 8000"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for every interface"
    return f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"


class Announcer:
    """Reports to the launcher over `--announce-fd` where this server listens and when it is ready, and ends with that
    process; does nothing without a descriptor.
    """

    def __init__(self, fd: int | None) -> None:
        """Raises ConfigError for a descriptor that this process has not."""
        self._fd = fd
        if fd is None:
            return
        from maitred.executor.parent import end_with_parent

        try:
            os.set_inheritable(fd, False)  # not for our child processes
        except OSError as error:
            raise ConfigError(f"announce_fd is {fd}, and this process inherited no such socket: {error}") from None
        end_with_parent(fd)

    def listening(self, url: str) -> None:
        if self._fd is not None:
            from maitred.fleet.launch import Listening, announce

            announce(self._fd, Listening(url, os.getpid()))

    def loaded(self, start_phases: Mapping[str, float], memory_bytes: int) -> None:
        if self._fd is not None:
            from maitred.fleet.launch import Loaded, announce

            announce(self._fd, Loaded(start_phases, memory_bytes))


COMMAND = Command(
    path="serve",
    summary="Serve a model over HTTP, as OpenAI's API. Without MODEL, smollm2 if it is installed, else maitred-mini.",
    run=_run,
    parts=(
        ServerConfig,
        AdmissionConfig,
        TenancyConfig,
        CaptureConfig,
        ShelfConfig,
        ProcessConfig,
        TensorConfig,
        SeveralOptions,
        *ENGINE_PARTS,
    ),
    positional="model",
    first=("model", "host", "port", "api_keys", "tenants", "dtype", "max_model_len", "max_num_seqs", "policy"),
    examples=(
        "maitred serve",
        "maitred serve your.gguf",
        "maitred serve ./Llama-3.2-1B --port 9000 --max-model-len 8192",
        "maitred serve --config serve.yaml --api-key SECRET",
        "maitred serve --tenants tenants.yaml --ledger ledger.sqlite",
        "maitred serve none --model-repository ./models",
        "maitred serve --models models.yaml --models-memory-bytes 12GiB",
        "maitred serve ./shelf --trust-key release.pub.pem",
    ),
)
