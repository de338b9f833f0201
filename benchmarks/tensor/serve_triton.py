"""The Triton that nvidia-pytriton's wheel holds, with its Python backend. HTTP port, gRPC port, repository.

It runs models in the Python that runs this: that must have libpython as a shared library.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

STUB = "triton_python_backend_stub"


def main(http_port: str, grpc_port: str, repository: str) -> None:
    found = importlib.util.find_spec("pytriton")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / STUB, home / "backends" / "python" / STUB)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),  # libpython's
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": sysconfig.get_path("platlib"),
    }
    command = (
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={home / 'backends'}",
        "--http-address=127.0.0.1",
        f"--http-port={http_port}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--allow-metrics=false",
    )
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
