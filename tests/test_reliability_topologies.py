"""The whole daemon over Sentinel, a cluster with shards, TLS and an ACL user."""

from __future__ import annotations

import subprocess
from pathlib import Path

import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, removed, running, stored, twice

from kvindexd.store.replies import ACL
from kvindexd.testing.engine import FakeEngine


def test_a_sentinel_failover_in_the_midst_of_ingest_loses_nothing() -> None:
    with servers.start_sentinels(servers.VALKEY) as group, FakeEngine() as engine:
        daemon = Daemon(**QUICK, redis__url=group.url)
        with running(daemon):
            daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            for n in range(10):
                engine.publish(twice(n))
            daemon.until_seq("w", 9)
            old = group.master()
            group.sentinels[0]("SENTINEL", "FAILOVER", "kvx")
            for n in range(10, 20):
                engine.publish(twice(n))
            servers.wait_until(lambda: group.master() is not old, "failed over")
            for n in range(20, 30):
                engine.publish(twice(n))
            daemon.until_seq("w", 29)
            daemon.until(lambda: matched(daemon, 30) == 30, "whole")
            # On the new master, not on the old one, which is read-only by now.
            servers.wait_until(lambda: b"role:slave" in old("INFO", "replication"), "demoted")
            engine.publish([removed(*range(1, 30))])
            daemon.until_seq("w", 30)
            daemon.until(lambda: matched(daemon, 30) == 30, "whole")
            assert matched(daemon, 30) == 30
            engine.publish([removed(*range(10, 30))])
            daemon.until_seq("w", 31)
            assert matched(daemon, 30) == 10
            assert counter(daemon, "lost_batches") == 0
            assert counter(daemon, "restarts") == 0


def test_a_cluster_with_shards_and_a_restart_of_kvindexd() -> None:
    names = [f"w{i}" for i in range(6)]
    with servers.start_cluster(servers.VALKEY) as group, FakeEngine(dp_size=6) as engine:
        daemon = Daemon(**QUICK, redis__url=group.url, redis__shards=6)
        with running(daemon):
            for i, name in enumerate(names):
                daemon.register(name, engine.endpoint(i), replay_endpoint=engine.replay_endpoint(i))
            engine.wait_subscribed()
            for n in range(10):
                for i in range(6):
                    engine.publish([stored(n)], rank=i)
            for name in names:
                daemon.until_seq(name, 9)
                assert matched(daemon, 10, name) == 10
            used = {node.port for node in group.nodes if node("KEYS", "kvx:*:w:*")}
            assert len(used) > 1, "spread over the masters"
            daemon.kill()
            for i in range(6):
                engine.publish([removed(9 - i)], rank=i)
            daemon.start()
            for i, name in enumerate(names):
                daemon.until_seq(name, 10)
                daemon.until(lambda i=i, n=name: matched(daemon, 10, n) == 9 - i, "exact")
                assert counter(daemon, "event:BlockStored", name) == 10


def test_tls_with_an_acl_user_and_a_password_file(tmp_path: Path) -> None:
    _certificates(tmp_path)
    port = servers.free_port()
    args = (
        *servers.VOLATILE,
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(tmp_path / "server.crt")),
        *("--tls-key-file", str(tmp_path / "server.key")),
        *("--tls-ca-cert-file", str(tmp_path / "server.crt")),
    )
    users = tmp_path / "users.conf"
    users.write_text(f"user default off\nuser kvx on >s3cr3t {ACL}\n")
    redis = servers.Server(f"{servers.redis_binary()} {users}", port, tmp_path, args, plain=False)
    password = tmp_path / "password"
    password.write_text("s3cr3t\n")
    try:
        redis.start()
        daemon = Daemon(
            **QUICK,
            redis__url=f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/server.crt",
            redis__username="kvx",
            redis__password_file=str(password),
        )
        with FakeEngine() as engine, running(daemon):
            daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            engine.publish([stored(0, 5)])
            daemon.until_seq("w", 0)
            daemon.kill()
            daemon.start()
            daemon.until(lambda: matched(daemon, 5) == 5, "kept")
            assert "s3cr3t" not in daemon.log()
    finally:
        redis.stop()


def _certificates(folder: Path) -> None:
    """A certificate for 127.0.0.1 that vouches for itself."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", "server.key", "-out", "server.crt"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
