"""Ways in: a systemd unit whose command is ours, an image made without a daemon, and a server in 256 MB."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import psutil
import pytest

from maitred.cli.main import load
from maitred.config import ServerConfig
from scripts.image import layer_of, write_image
from tests.conftest import start_server
from tests.waiting import HANGS_S

UNIT = Path(__file__).parents[2] / "deploy/maitred.service"
LIMIT_BYTES = 256 * 2**20


def settings() -> dict[str, str]:
    lines = (line.partition("=") for line in UNIT.read_text().splitlines() if not line.startswith(("#", "[")))
    return {name: value for name, _, value in lines if name}


def test_the_unit_runs_a_command_of_ours_and_waits_for_longer_than_it_drains(tmp_path: Path):
    given = dict(each.partition("=")[::2] for each in shlex.split(settings()["Environment"]))
    given |= {"STATE_DIRECTORY": str(tmp_path), "ARGS": "--host 0.0.0.0"}
    line = settings()["ExecStart"].replace("${", "$").replace("$STATE_DIRECTORY", given["STATE_DIRECTORY"])
    program, command, *flags = line.replace("$MODEL", given["MODEL"]).replace("$ARGS", given["ARGS"]).split()
    assert (Path(program).name, command) == ("maitred", "serve")
    load(command).parse(flags, {})
    assert int(settings()["TimeoutStopSec"]) > ServerConfig().drain_timeout_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/maitred/bin/maitred", shutil.which("true") or "/bin/true"))
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


def test_an_image_has_blobs_by_their_digests_and_equal_files_give_an_equal_one(tmp_path: Path):
    root = tmp_path / "root"
    for name in ("tmp", "usr/bin", "usr/share/doc/x", "home/maitred"):
        (root / name).mkdir(parents=True)
    (root / "usr/bin/maitred").write_text("x")
    images = []
    for name in ("one.tar", "two.tar"):
        write_image(layer_of(root), {"User": "1000"}, tmp_path / name)
        images.append((tmp_path / name).read_bytes())
        os.utime(root / "usr/bin/maitred", (1, 1))
    assert images[0] == images[1]
    with tarfile.open(tmp_path / "one.tar") as image:
        files = {entry.name: image.extractfile(entry).read() for entry in image}  # type: ignore[union-attr]
    blobs = {name.rpartition("/")[2]: content for name, content in files.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blobs[entry["digest"].removeprefix("sha256:")])
    (layer,) = manifest["layers"]
    (tmp_path / "layer").write_bytes(blobs[layer["digest"].removeprefix("sha256:")])
    with tarfile.open(tmp_path / "layer") as kept:
        names = {member.name: member for member in kept}
    assert "usr/bin/maitred" in names
    assert "usr/share/doc" not in names
    assert (names["tmp"].mode, names["home/maitred"].uid) == (0o1777, 1000)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_the_built_in_model_serves_in_256_mb_with_a_grammar_and_many_at_once():
    server = start_server("maitred-mini", "--kv-cache-memory-bytes", "40MiB")
    asked = {"messages": [{"role": "user", "content": "What is the soup?"}], "n": 8, "max_tokens": 60}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "maxProperties": 1}}}
    for more in ({}, {"response_format": shape}):
        httpx.post(f"{server.url}/v1/chat/completions", json=asked | more, timeout=HANGS_S).raise_for_status()
    ours = psutil.Process(server.process.pid)
    sizes = {each.pid: each.memory_full_info().pss for each in (ours, *ours.children(recursive=True))}
    server.stop()
    assert len(sizes) >= 2
    assert sum(sizes.values()) < LIMIT_BYTES, sizes
