"""Routers that `bench_route.py` measures: how each is started in front of some replicas, and set up."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """Who is measured, by the words that start it."""

    command: list[str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def maitred(work: Path, port: int, replicas: list[int]) -> Peer:
    urls = [f"http://127.0.0.1:{p}" for p in replicas]
    return Peer([sys.executable, "-m", "maitred", "route", *urls, "--port", str(port), "--log-level", "warning"])


def sglang(work: Path, port: int, replicas: list[int]) -> Peer | None:
    python = work / "sglang" / "bin" / "python"
    if not python.exists():
        return None
    urls = [f"http://127.0.0.1:{p}" for p in replicas]
    words = ["-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", "cache_aware"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warn", "--prometheus-port", str(free_port())]
    return Peer([str(python), *words])


def haproxy(work: Path, port: int, replicas: list[int]) -> Peer | None:
    if shutil.which("haproxy") is None:
        return None
    servers = "".join(f"  server s{p} 127.0.0.1:{p}\n" for p in replicas)
    path = work / "haproxy.cfg"
    path.write_text(
        "global\n  nbthread 1\ndefaults\n  mode http\n  timeout connect 1s\n  timeout client 60s\n"
        "  timeout server 60s\n"
        f"  http-reuse always\nfrontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n"
        f"  balance leastconn\n{servers}"
    )
    return Peer(["haproxy", "-f", str(path)])


PEERS: dict[str, Callable[[Path, int, list[int]], Peer | None]] = {
    "maitred": maitred,
    "sglang-router": sglang,
    "haproxy": haproxy,
}


def set_up(work: Path) -> None:
    """What is not on the path, into environments of its own."""
    for name, package in (("sglang", "sglang-router==0.3.2"),):
        subprocess.run([sys.executable, "-m", "venv", str(work / name)], check=True)
        subprocess.run([str(work / name / "bin" / "python"), "-m", "pip", "install", "-q", package], check=True)
