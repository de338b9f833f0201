"""`maitred bench infer`: a load generator for any KServe v2 server, Triton's too."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.command import Command, Options
from maitred.cli.flags import option
from maitred.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """What is asked of which server, and how often"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where the server is; for gRPC HOST:PORT."""
    model: str = option(metavar="NAME")
    """The model; what it takes is asked of the server."""
    protocol: str = option("http", choices=("http", "grpc"))
    """http (binary tensor data) or grpc."""
    shm: bool = False
    """The inputs go by shared memory, which the server must be able to map; it takes an administrator's key."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """Key sent as `Authorization: Bearer KEY`."""
    rows: int = 1
    """Of each request, where the model takes batches."""
    length: int = 16
    """Of dimensions of any length."""
    concurrency: int | None = option(None, metavar="N")
    """So many clients, each asking again once it was answered (1 without --rate)."""
    rate: float | None = option(None, metavar="R")
    """Requests that come a second, whatever becomes of those before; gaps are exponential."""
    num_requests: int | None = option(None, metavar="N")
    """So many, or for as long as --duration."""
    duration_s: float = option(10.0, metavar="SECONDS", name="--duration")
    """At most."""
    seed: int = 0
    """Of the gaps."""
    json: bool = False
    """Print what was measured as JSON."""

    def __post_init__(self) -> None:
        if self.protocol not in ("http", "grpc"):
            raise ConfigError(f"protocol is {self.protocol!r}; choose http or grpc")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("rate and concurrency are two ways to load a server; give one of them")
        for name in ("rows", "length", "concurrency", "rate", "num_requests", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be over 0")


def _run(options: Options) -> int:
    import asyncio

    import msgspec

    from maitred.tensor.infer_load import lines, run_load
    from maitred.tensor.infer_servers import Asked

    given = options[InferOptions]
    asked = Asked(
        url=given.url,
        model=given.model,
        protocol=given.protocol,
        rows=given.rows,
        length=given.length,
        shm=given.shm,
        api_key=given.api_key,
    )
    load = run_load(
        asked,
        concurrency=given.concurrency,
        rate=given.rate,
        num_requests=given.num_requests,
        duration_s=given.duration_s,
        seed=given.seed,
    )
    measured = asyncio.run(load)
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(measured.to_json()), indent=2).decode())
    else:
        print("\n".join(lines(measured)))
    return 0 if measured.latencies_s else 1


COMMAND = Command(
    path="bench infer",
    summary="Load any KServe v2 server, Triton's too, and measure a model's latency and throughput.",
    run=_run,
    parts=(InferOptions,),
    first=("url", "model", "protocol", "shm", "rows", "length", "concurrency", "rate", "num_requests", "json"),
    examples=(
        "maitred bench infer --model resnet --concurrency 16",
        "maitred bench infer --url 127.0.0.1:8001 --protocol grpc --model encoder --length 64 --rate 200",
    ),
)
