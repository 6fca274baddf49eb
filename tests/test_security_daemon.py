"""A daemon with TLS, client certificates and tokens, on listeners of their own, and who gets in."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import pytest
import trustme
from certificates import HOST, Files, Pair, channel, issue, replace
from cryptography.hazmat.primitives import serialization
from daemon import Daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.config import ConfigError
from kvindexd.config.protecting import TlsConfig
from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.security.certificates import Certificates
from kvindexd.security.credentials import Access, CertificateRoles
from kvindexd.security.http import HttpProtection
from kvindexd.telemetry import MetricsServer
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

ADMIN, SCORE, READ = (f"{role}-0123456789abcdef" for role in ("admin", "score", "read"))
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class Secure(NamedTuple):
    """A daemon that asks for a client certificate on its own ports, and on ext_proc for a token."""

    daemon: Daemon
    ca: trustme.CA
    clients: trustme.CA
    gateway: Pair
    ops: Pair
    files: Files
    tokens: Path

    def open(self, client: Pair | None, listener: str = "admin") -> grpc.Channel:
        return channel(self.daemon.ready[listener], self.ca, client)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    ca, clients = trustme.CA(), trustme.CA()
    files, tokens = Files(folder), folder / "tokens"
    files.write(issue(ca, HOST), clients)
    tokens.write_text(f"admin {ADMIN}\nread {READ}\n")
    daemon = Daemon(
        **files.settings(),
        **{
            "index.data_dir": str(folder),
            "server.admin_listen": "127.0.0.1:0",
            "tls.client_certs": ["server", "admin"],
            "auth.tokens_file": str(tokens),
            "auth.tokens": {"score": [SCORE]},
            "auth.clients": {"dns:*.gateways.example": "score", "cn:ops-*": "admin"},
            "auth.metrics": "closed",
        },
    )
    gateway = issue(clients, "a.gateways.example")
    ops = issue(clients, "host.example", cn="ops-1")
    try:
        yield Secure(daemon.start(), ca, clients, gateway, ops, files, tokens)
        assert daemon.stop() == 0
    finally:
        if daemon.process is not None:
            daemon.kill()


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def tried(call: Any, request: Any, token: str = "") -> tuple[grpc.StatusCode, str]:
    """Status and words of a call."""
    try:
        call(request, timeout=10, metadata=bearer(token) if token else None)
    except grpc.RpcError as e:
        return e.code(), e.details()
    return grpc.StatusCode.OK, ""


def score() -> pb.ScoreWorkersRequest:
    return pb.ScoreWorkersRequest(prompt=pb.Prompt(model="m", tokens=pb.TokenIds(ids=[1] * 32)))


def register(worker_id: str = "w0") -> pb.RegisterWorkerRequest:
    worker = pb.Worker(
        worker_id=worker_id,
        model="m",
        address="127.0.0.1:1",
        kv_events_endpoint="tcp://127.0.0.1:9",
    )
    return pb.RegisterWorkerRequest(worker=worker)


# -- the connection -------------------------------------------------------------------------------


def test_who_gets_a_connection(secure: Secure) -> None:
    stranger = trustme.CA()
    wrong = {
        "none": None,
        "wrong authority": issue(stranger, "a.gateways.example"),
        "expired": issue(secure.clients, "a.gateways.example", expired=True),
    }
    for what, client in wrong.items():
        for listener in ("grpc", "admin"):
            with secure.open(client, listener) as made:
                code, _ = tried(rpc.KVIndexStub(made).ScoreWorkers, score(), ADMIN)
                assert code == UNAVAILABLE, (what, listener)
    with channel(secure.daemon.ready["grpc"], stranger, secure.gateway) as made:
        code, _ = tried(rpc.KVIndexStub(made).ScoreWorkers, score())
        assert code == UNAVAILABLE  # the client does not trust the server either
    with grpc.insecure_channel(secure.daemon.ready["grpc"]) as made:
        assert tried(rpc.KVIndexStub(made).ScoreWorkers, score())[0] == UNAVAILABLE


def test_roles_of_certificates_and_tokens(secure: Secure) -> None:
    nobody = issue(secure.clients, "b.elsewhere.example")
    steer = "kvindexd.v1.KVIndexAdmin/RegisterWorker needs role admin"
    with secure.open(secure.gateway) as gateway, secure.open(nobody) as other:
        admin, index = rpc.KVIndexAdminStub(gateway), rpc.KVIndexStub(gateway)
        assert tried(index.ScoreWorkers, score())[0] == grpc.StatusCode.NOT_FOUND
        code, said = tried(admin.RegisterWorker, register())
        assert (code, said) == (DENIED, f"{steer}; the credentials have score")
        assert tried(admin.RegisterWorker, register(), READ)[0] == DENIED
        assert tried(admin.ListWorkers, pb.ListWorkersRequest(), READ)[0] == grpc.StatusCode.OK
        assert tried(admin.RegisterWorker, register(), ADMIN)[0] == grpc.StatusCode.OK
        code, said = tried(admin.RegisterWorker, register(), ADMIN + "x")
        assert code == UNAUTHENTICATED
        assert said == f"authorization: the token is not known here; {steer}"
        code, said = tried(rpc.KVIndexAdminStub(other).RegisterWorker, register())
        assert code == UNAUTHENTICATED
        assert said.startswith(f"no credentials: {steer}; send a token")
        assert tried(rpc.KVIndexStub(other).ScoreWorkers, score())[0] == UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest(), timeout=9)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    with secure.open(secure.ops) as made:
        assert tried(rpc.KVIndexAdminStub(made).RegisterWorker, register())[0] == (
            grpc.StatusCode.OK
        )
    text = _page(secure, "/metrics", {"authorization": f"Bearer {READ}"})[1]
    for reason in ("missing", "unknown_token", "role"):
        assert f'kvindexd_auth_failures_total{{reason="{reason}"}}' in text
    assert secure.daemon.events("call_refused")
    assert not any(t in secure.daemon.log() for t in (ADMIN, SCORE, READ))


def test_streams_are_guarded_too(secure: Secure) -> None:
    with secure.open(issue(secure.clients, "b.elsewhere.example")) as made:
        watching = rpc.KVIndexAdminStub(made).WatchWorkers(pb.WatchWorkersRequest(), timeout=9)
        with pytest.raises(grpc.RpcError) as caught:
            next(watching)
        assert caught.value.code() == UNAUTHENTICATED
        scoring = rpc.KVIndexStub(made).ScoreWorkersStream(iter([score()]), timeout=9)
        with pytest.raises(grpc.RpcError) as caught:
            next(scoring)
        assert caught.value.code() == UNAUTHENTICATED


def test_administration_is_on_its_own_listener(secure: Secure) -> None:
    with secure.open(secure.ops, "grpc") as made:
        code, _ = tried(rpc.KVIndexAdminStub(made).ListWorkers, pb.ListWorkersRequest())
        assert code == grpc.StatusCode.UNIMPLEMENTED
    assert secure.daemon.ready["admin"] != secure.daemon.ready["grpc"]


def test_ext_proc_over_tls_with_a_token(secure: Secure) -> None:
    request = ep.ProcessingRequest(request_headers=ep.HttpHeaders(end_of_stream=True))
    with secure.open(None, "ext_proc") as made:
        process = made.stream_stream(
            PROCESS,
            ep.ProcessingRequest.SerializeToString,
            ep.ProcessingResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(process(iter([request]), timeout=9))
        assert caught.value.code() == UNAUTHENTICATED
        answer = next(process(iter([request]), timeout=9, metadata=bearer(SCORE)))
        assert answer.WhichOneof("response") is not None


# -- the metrics port -----------------------------------------------------------------------------


def _page(secure: Secure, path: str, headers: dict[str, str]) -> tuple[int, str]:
    context = ssl.create_default_context(cadata=secure.ca.cert_pem.bytes().decode())
    host, _, port = secure.daemon.ready["metrics"].rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status == 401:
            assert (answer.getheader("WWW-Authenticate") or "").startswith("Basic ")
        return answer.status, text
    finally:
        connection.close()


def test_the_metrics_port(secure: Secure) -> None:
    password = base64.b64encode(f"me:{READ}".encode()).decode()
    expected = {
        "": 401,
        f"Bearer {READ}": 200,
        f"Bearer {READ}x": 401,
        f"Bearer {SCORE}": 403,
        f"Basic {password}": 200,
        "Basic ?": 401,
    }
    for path in ("/metrics", "/ui"):
        for sent, status in expected.items():
            got, text = _page(secure, path, {"authorization": sent} if sent else {})
            assert got == status, (path, sent, text)
            assert READ not in text
    assert [_page(secure, p, {})[0] for p in ("/healthz", "/readyz")] == [200, 200]


# -- the command line -----------------------------------------------------------------------------


def test_the_command_line_shows_credentials(secure: Secure, tmp_path: Path) -> None:
    for name, content in (
        ("ca", secure.ca.cert_pem.bytes()),
        ("crt", secure.gateway.cert),
        ("key", secure.gateway.key),
    ):
        (tmp_path / name).write_bytes(content)
    arguments = [
        *("workers", "list", "--json", "--server", secure.daemon.ready["admin"]),
        *("--ca", str(tmp_path / "ca"), "--cert", str(tmp_path / "crt")),
    ]

    def run(*more: str, **variables: str) -> tuple[int, str]:
        ran = CliRunner().invoke(app, [*arguments, *more], env=variables | {"COLUMNS": "200"})
        return ran.exit_code, ran.output

    status, said = run("--key", str(tmp_path / "key"))
    assert (status, "ListWorkers needs role read or admin" in said) == (1, True), said
    status, said = run(KVINDEXD_KEY=str(tmp_path / "key"), KVINDEXD_TOKEN=READ)
    assert status == 0, said
    assert [w["worker_id"] for w in json.loads(said)["workers"]] == ["w0"]
    status, said = run()
    assert (status, "--cert and --key belong together" in said) == (1, True), said


# -- changes without a restart --------------------------------------------------------------------


def test_tokens_are_rotated(secure: Secure) -> None:
    fresh = "fresh-0123456789abcdef"
    with secure.open(secure.gateway) as made:
        listing, request = rpc.KVIndexAdminStub(made).ListWorkers, pb.ListWorkersRequest()
        assert tried(listing, request, fresh)[0] == UNAUTHENTICATED
        replace(secure.tokens, f"admin {ADMIN}\nread {READ}\nread {fresh}\n".encode())
        secure.daemon.until(lambda: tried(listing, request, fresh)[0] == grpc.StatusCode.OK, "new")
        replace(secure.tokens, f"admin {ADMIN}\nread {READ}\n".encode())
        secure.daemon.until(lambda: tried(listing, request, fresh)[0] == UNAUTHENTICATED, "gone")
        assert tried(listing, request, READ)[0] == grpc.StatusCode.OK
        assert tried(listing, request, SCORE)[0] == DENIED  # of the settings, not of the file


def test_certificates_are_replaced_and_old_connections_go_on(secure: Secure) -> None:
    old = secure.open(secure.ops)
    with old:
        watch = rpc.KVIndexAdminStub(old).WatchWorkers(pb.WatchWorkersRequest())
        next(watch)
        ca, clients = trustme.CA(), trustme.CA()
        # A certificate without its key: new connections still get the old pair.
        pair = issue(ca, HOST)
        replace(secure.files.cert, pair.cert)
        with secure.open(secure.ops) as made:
            assert tried(rpc.KVIndexAdminStub(made).ListWorkers, pb.ListWorkersRequest())[0] == (
                grpc.StatusCode.OK
            )
        secure.daemon.until(lambda: secure.daemon.events("certificates_not_reloaded"), "said")
        secure.files.write(pair, clients)
        renewed = secure._replace(ca=ca, clients=clients)
        ops = issue(clients, "host.example", cn="ops-2")
        for listener in ("admin", "grpc"):
            with renewed.open(ops, listener) as made:
                assert tried(rpc.KVIndexStub(made).ScoreWorkers, score())[0] == grpc.StatusCode.OK
            with renewed.open(secure.ops, listener) as made:  # of the old authority
                assert tried(rpc.KVIndexStub(made).ScoreWorkers, score())[0] == UNAVAILABLE
            with secure.open(secure.ops, listener) as made:  # the client trusts the old one only
                assert tried(rpc.KVIndexStub(made).ScoreWorkers, score())[0] == UNAVAILABLE
        assert _page(renewed, "/healthz", {})[0] == 200
        with pytest.raises(ssl.SSLError):
            _page(secure, "/healthz", {})
        # The connection from before is none the worse for it.
        admin = rpc.KVIndexAdminStub(old)
        assert tried(admin.RegisterWorker, register("w1"))[0] == grpc.StatusCode.OK
        deadline = time.monotonic() + 10
        while next(watch).worker.worker_id != "w1":
            assert time.monotonic() < deadline
        watch.cancel()
    secure.files.write(issue(secure.ca, HOST), secure.clients)
    text = _page(secure, "/metrics", {"authorization": f"Bearer {ADMIN}"})[1]
    assert 'credential_reloads_total{outcome="used",what="certificates"}' in text
    assert 'credential_reloads_total{outcome="unusable",what="certificates"}' in text


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    files = Files(tmp_path)
    tls = TlsConfig(cert_file=str(files.cert), key_file=str(files.key))
    with pytest.raises(ConfigError, match=r"tls: cannot read .*tls.crt: No such file"):
        Certificates(tls)
    ca = trustme.CA()
    files.write(issue(ca, HOST)._replace(key=issue(ca, HOST).key), ca)
    with pytest.raises(ConfigError, match="are no certificate with its private key"):
        Certificates(tls)
    sealed = serialization.load_pem_private_key(issue(ca, HOST).key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
    files.write(issue(ca, HOST)._replace(key=sealed), ca)
    with pytest.raises(ConfigError, match="without a passphrase"):
        Certificates(tls)
    files.write(issue(ca, HOST), ca)
    assert Certificates(tls).generation == 0
    files.ca.write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca.crt holds no certificate"):
        Certificates(TlsConfig(**{**msgspec.structs.asdict(tls), "client_ca_file": str(files.ca)}))


async def test_client_certificates_on_the_metrics_port(tmp_path: Path) -> None:
    """In this process: which page by which certificate, and another authority without a restart."""
    ca, clients = trustme.CA(), trustme.CA()
    files = Files(tmp_path)
    files.write(issue(ca, HOST), clients)
    settings = {key.removeprefix("tls."): value for key, value in files.settings().items()}
    certificates = Certificates(TlsConfig(**settings, client_certs=["metrics"]))
    roles = CertificateRoles({"dns:prom.example": "read", "cn:gw": "score"})
    access, failed = Access(list, roles, metrics_open=False), []
    protected = HttpProtection(certificates.http_context("metrics"), access, failed.append)
    server = MetricsServer(CollectorRegistry(), lambda: "", port=0, protected=protected)
    _, port = await server.start()

    def get(client: Pair | None, path: str) -> int:
        context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
        if client is not None:
            (tmp_path / "client").write_bytes(client.key + client.cert)
            context.load_cert_chain(tmp_path / "client")
        connection = http.client.HTTPSConnection(HOST, port, timeout=10, context=context)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    async def status(client: Pair | None, path: str = "/metrics") -> int:
        """0 = no connection."""
        try:
            return await asyncio.to_thread(get, client, path)
        except (OSError, http.client.HTTPException):
            return 0

    try:
        prometheus = issue(clients, "prom.example")
        assert await status(prometheus) == 200
        assert await status(issue(clients, "x.example", cn="gw")) == 403
        assert await status(issue(clients, "x.example")) == 401
        assert await status(issue(clients, "x.example"), "/healthz") == 200
        assert await status(issue(trustme.CA(), "prom.example"), "/healthz") == 0
        assert await status(None, "/healthz") == 0
        assert failed == ["role", "missing"]
        fresh = trustme.CA()
        replace(files.ca, fresh.cert_pem.bytes())
        assert await status(prometheus) == 0
        assert await status(issue(fresh, "prom.example")) == 200
    finally:
        await server.close()
