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
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from maitred.api.http.server import Certificate, validity_of_chain
from maitred.core.errors import ConfigError
from tests.api.conftest import MESSAGES
from tests.conftest import ROOT
from tests.fakes_api import FakeReplica, RunningServer, running_server, says
from tests.waiting import HANGS_S, until

PAIRS = Path(__file__).parent / "certificates"  # self-signed for 127.0.0.1, valid for a century or long expired


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


def serving(folder: Path) -> AbstractContextManager[RunningServer]:
    files = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}
    return running_server(FakeReplica(says("x" * 9), held=True), sse_keep_alive_s=0.3, **files)


@pytest.fixture
def secure(folder: Path) -> Iterator[RunningServer]:
    with serving(folder) as server:
        yield server


def connected(server: RunningServer, trust: ssl.SSLContext | bool) -> httpx.Client:
    kept = httpx.Limits(keepalive_expiry=None)
    return httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust, timeout=HANGS_S, limits=kept)


def replaced_under_a_stream(server: RunningServer, folder: Path, client: httpx.Client, new: str) -> None:
    """Afterwards the stream has come to its end, and its connection lives on."""
    assert client.get("/health").status_code == 200
    body = {"model": "tiny", "messages": MESSAGES, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:  # begun by a comment
        put(new, folder)
        until(lambda: subject(server.port) == der(new))
        server.replica.held = False
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert client.get("/health").status_code == 200, "the connection lives on"


def test_a_certificate_is_replaced_and_no_connection_breaks(secure: RunningServer, folder: Path):
    with connected(secure, trusting("first")) as before:
        replaced_under_a_stream(secure, folder, before, "second")
    with connected(secure, trusting("second")) as after:
        assert after.get("/health").status_code == 200


EXPIRED = "expired on 2001-02-03 04:05:06 UTC: clients that verify it refuse to connect"


def test_an_expired_certificate_is_served_to_who_does_not_look_and_replaced_under_a_stream(folder: Path, caplog):
    put("expired", folder)
    with serving(folder) as server:
        assert caplog.text.count(EXPIRED) == 1
        with connected(server, trusting("expired")) as looking, pytest.raises(httpx.ConnectError, match="has expired"):
            looking.get("/health")
        with connected(server, False) as careless:
            replaced_under_a_stream(server, folder, careless, "first")
        with connected(server, trusting("first")) as after:
            assert after.get("/health").status_code == 200
    assert caplog.text.count(EXPIRED) == 1, "told once, and not of the one that is valid"


def test_an_expired_certificate_that_replaces_a_valid_one_is_taken_and_told(
    secure: RunningServer, folder: Path, caplog
):
    with connected(secure, trusting("first")) as before:
        replaced_under_a_stream(secure, folder, before, "expired")
    until(lambda: EXPIRED in caplog.text)
    with connected(secure, trusting("expired")) as looking, pytest.raises(httpx.ConnectError, match="has expired"):
        looking.get("/health")
    put("second", folder)
    until(lambda: subject(secure.port) == der("second"))


def test_a_certificate_that_expires_while_it_is_in_force_is_told_once(caplog):
    year = [2100]
    certificate = Certificate(
        *(str(PAIRS / f"first.{ending}") for ending in ("pem", "key")),
        today=lambda: datetime(year[0], 1, 1, tzinfo=UTC).timestamp(),
    )
    certificate.look()
    assert caplog.text == ""
    year[0] = 2127
    certificate.look()
    certificate.look()
    assert caplog.text.count("expired on 2126-10-28 22:02:10 UTC") == 1
    year[0] = 1990
    certificate.look()
    assert caplog.text.count("is not valid before 2026-11-21 22:02:10 UTC") == 1


def test_a_chain_is_valid_while_all_of_it_is(tmp_path: Path):
    chain = tmp_path / "chain.pem"
    chain.write_text("".join((PAIRS / f"{name}.{ending}").read_text() for name, ending in CHAIN))
    validity = validity_of_chain(str(chain))
    assert validity.begins == datetime(2026, 11, 21, 22, 2, 10, tzinfo=UTC)
    assert validity.ends == datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC)


CHAIN = (("first", "key"), ("first", "pem"), ("expired", "pem"))


def test_a_certificate_cut_short_anywhere_has_no_dates(tmp_path: Path):
    for length in range(len(der("first"))):
        (tmp_path / "cut.pem").write_text(ssl.DER_cert_to_PEM_cert(der("first")[:length]))
        with pytest.raises(ValueError, match=r"an element of|something else than certificates"):
            validity_of_chain(str(tmp_path / "cut.pem"))


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


HANG_UP = """
import sys
from maitred.api.http import server
from maitred.api import serving
from maitred.api.http import server
from maitred.config import ServerConfig
from tests.fakes_api import FakeReplica, make_model

server.LOOK_S = 10_000.0  # nobody looks
config = ServerConfig(port=0, ssl_certfile=sys.argv[1] + ".pem", ssl_keyfile=sys.argv[1] + ".key")
app = serving.create_app(FakeReplica(), make_model(), config)
server.HttpServer(app, config, on_open=lambda host, port: print(port, flush=True)).run()
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
