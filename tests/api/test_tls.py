"""HTTPS: from TLS 1.2 on, and a certificate that is replaced under a living server without a broken connection."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from maitred.api.tls import Certificate
from maitred.config import ServerConfig
from maitred.errors import ConfigError
from tests.api.conftest import MESSAGES
from tests.conftest import ROOT
from tests.fakes_api import FakeReplica, RunningServer, running_server, says
from tests.waiting import HANGS_S, until

PAIRS = Path(__file__).parent / "certificates"  # self-signed for 127.0.0.1, valid for a century, used nowhere else


def put(name: str, folder: Path) -> None:
    """Replace certificate and key, one after the other, as tools do."""
    for ending in ("key", "pem"):
        shutil.copy(PAIRS / f"{name}.{ending}", folder / f"new.{ending}")
        os.replace(folder / f"new.{ending}", folder / f"server.{ending}")


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(PAIRS / f"{name}.pem"))


def subject(port: int) -> bytes:
    """The certificate a new connection gets, as sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as plain, context.wrap_socket(plain) as wrapped:
        sent = wrapped.getpeercert(binary_form=True)
    assert sent is not None
    return sent


def greet(server: ssl.SSLContext, most: ssl.TLSVersion) -> None:
    """What `server` makes of the first words of a client that speaks nothing newer than `most`."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1, most
    words, answer = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.wrap_bio(answer, words).do_handshake()
    server.wrap_bio(words, answer, server_side=True).do_handshake()


def der(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((PAIRS / f"{name}.pem").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put("first", tmp_path)
    return tmp_path


@pytest.fixture
def secure(folder: Path) -> Iterator[RunningServer]:
    files = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}
    with running_server(FakeReplica(says("x" * 9), held=True), sse_keep_alive_s=0.3, **files) as server:
        yield server


def test_a_certificate_is_replaced_and_no_connection_breaks(secure: RunningServer, folder: Path):
    url = f"https://127.0.0.1:{secure.port}"
    body = {"model": "tiny", "messages": MESSAGES, "stream": True}
    kept = httpx.Limits(keepalive_expiry=None)
    with httpx.Client(base_url=url, verify=trusting("first"), timeout=HANGS_S, limits=kept) as before:
        assert before.get("/health").status_code == 200
        with before.stream("POST", "/v1/chat/completions", json=body) as answer:  # begun by a comment
            put("second", folder)
            until(lambda: subject(secure.port) == der("second"))
            secure.replica.held = False
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert before.get("/health").status_code == 200, "the connection lives on"
    with httpx.Client(base_url=url, verify=trusting("second"), timeout=HANGS_S) as after:
        assert after.get("/health").status_code == 200


def test_files_that_cannot_be_used_leave_the_old_certificate_in_force(secure: RunningServer, folder: Path, caplog):
    (folder / "server.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    until(lambda: "the certificate before stays in force" in caplog.text)
    assert subject(secure.port) == der("first")
    put("second", folder)
    until(lambda: subject(secure.port) == der("second"))


def test_old_versions_of_tls_and_plain_http_are_turned_away(secure: RunningServer):
    context = Certificate(str(PAIRS / "first.pem"), str(PAIRS / "first.key")).context
    with pytest.raises(ssl.SSLWantReadError):  # it answered and waits for more
        greet(context, ssl.TLSVersion.TLSv1_2)
    for most in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
            greet(context, most)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{secure.port}/health", timeout=HANGS_S)
    assert httpx.get(f"https://127.0.0.1:{secure.port}/health", verify=trusting("first")).status_code == 200


@pytest.mark.parametrize(
    ("certificate", "key"), [("none.pem", "first.key"), ("first.pem", "second.key"), ("first.pem", None)]
)
def test_a_certificate_that_cannot_be_used_is_told_with_what_it_takes(certificate, key):
    with pytest.raises(ConfigError, match=r"cannot use the certificate .*--ssl-keyfile"):
        Certificate(str(PAIRS / certificate), str(PAIRS / key) if key is not None else None)


def test_a_key_alone_is_refused():
    with pytest.raises(ConfigError, match="without ssl_certfile"):
        ServerConfig(ssl_keyfile="x")


HANG_UP = """
import sys
from maitred.api import server
from maitred.api import tls
from maitred.config import ServerConfig
from tests.fakes_api import FakeReplica, make_model

tls.LOOK_S = 10_000.0  # nobody looks
config = ServerConfig(port=0, ssl_certfile=sys.argv[1] + ".pem", ssl_keyfile=sys.argv[1] + ".key")
app = server.create_app(FakeReplica(), make_model(), config)
server.Server(app, config, on_open=lambda host, port: print(port, flush=True)).run()
"""


def test_a_hangup_reloads_and_does_not_end_the_server(folder: Path):
    words = [sys.executable, "-c", HANG_UP, str(folder / "server")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        put("second", folder)
        assert subject(port) == der("first")
        process.send_signal(signal.SIGHUP)
        until(lambda: subject(port) == der("second"))
        process.terminate()
        assert process.wait(HANGS_S) == 0
