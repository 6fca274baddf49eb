"""The parts of kvindexd as deploy/ ships them, as local processes around a Redis with TLS.

A sidecar and a scorer are made from the manifests of the production overlay, the others from the
systemd units; the Redis has the arguments of the shipped StatefulSet and the users of
deploy/secrets.sh. Only ports and folders are replaced.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import servers
import trustme
from certificates import issue
from deployed import (
    DEPLOY,
    KUBERNETES,
    container_environment,
    containers,
    documents,
    image_argument,
    image_environment,
    literals,
    local_command,
    local_environment,
    unit,
)

from kvindexd.testing.engine import FakeEngine, free_ports

PRODUCTION = KUBERNETES / "overlays" / "production"
TOKEN = "admin-0123456789abcdef"
NAMES = ("pod-0", "host-1")


class Process:
    """One process of the fleet; `start` again after `stop` is its restart."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.command, self.environment, self.log = command, environment, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, cwd="/", stdout=log, stderr=log
            )
        return self

    def stop(self) -> None:
        """As an orchestrator does: SIGTERM, and its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0, self.said()

    def said(self) -> str:
        return self.log.read_text()[-4000:]

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Fleet:
    """All parts; `ports` of a scorer: gRPC, administration, ext_proc, metrics."""

    def __init__(self, folder: Path, engines: list[FakeEngine]) -> None:
        self.folder, self.engines = folder, engines
        self.ca = trustme.CA()
        self.redis = _redis(folder, self.ca)
        self.ports = [range(first := free_ports(4), first + 4) for _ in range(4)]
        for name, text in {
            "tokens": f"admin {TOKEN}\n",
            "ca.crt": self.ca.cert_pem.bytes(),
        }.items():
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        pair = issue(self.ca, "localhost", "127.0.0.1")
        (folder / "tls.crt").write_bytes(pair.cert)
        (folder / "tls.key").write_bytes(pair.key)
        self.sidecars = [self._pod_sidecar(), self._unit_sidecar()]
        self.scorers = [self._pod_scorer(), self._unit_scorer()]

    def _places(self, index: int, **more: str) -> dict[str, str]:
        """What the test has in the place of ports and folders."""
        grpc_, admin, ext_proc, metrics = self.ports[index]
        return {
            "redis.example:6379": f"localhost:{self.redis.port}",
            "/etc/kvindexd/redis/password": str(self.folder / "redis_password"),
            "/etc/kvindexd/redis/": f"{self.folder}/",
            "/etc/kvindexd/tls/": f"{self.folder}/",
            "/etc/kvindexd/tokens/": f"{self.folder}/",
            "/etc/kvindexd/kvindexd.toml": str(self.folder / f"{index}.toml"),
            "0.0.0.0:50051": f"127.0.0.1:{grpc_}",
            "127.0.0.1:50052": f"127.0.0.1:{admin}",
            "0.0.0.0:9002": f"127.0.0.1:{ext_proc}",
            "0.0.0.0:9400": f"127.0.0.1:{metrics}",
        } | more

    def _pod(self, index: int, args: list[str], own: dict[str, str], **more: str) -> Process:
        places = self._places(index, **more)
        redis = literals(PRODUCTION / "kustomization.yaml", "kvindexd-redis")
        environment = image_environment() | redis | own
        command = [*image_argument("ENTRYPOINT"), *args]
        log = self.folder / f"{index}.log"
        return Process(local_command(command, places), local_environment(environment, places), log)

    def _pod_sidecar(self) -> Process:
        (shipped,) = containers(KUBERNETES / "components" / "engine-sidecar" / "sidecar.yaml")
        fields = {"POD_NAME": NAMES[0], "POD_UID": "u-0", "POD_IP": "10.1.1.1", "MODEL": "m"}
        own = container_environment([shipped], fields)
        engine = self.engines[0]
        more = {
            "tcp://127.0.0.1:5557": engine.endpoint(),
            "tcp://127.0.0.1:5558": engine.replay_endpoint(),
        }
        return self._pod(0, shipped["args"], own, **more)

    def _pod_scorer(self) -> Process:
        (shipped,) = containers(KUBERNETES / "base" / "scorer.yaml")
        (patch,) = containers(PRODUCTION / "callers.yaml")
        return self._pod(2, shipped["args"], container_environment([shipped, patch], {}))

    def _unit(self, index: int, role: str, text: str) -> Process:
        """A unit with a configuration file as its host would have it."""
        redis = literals(PRODUCTION / "kustomization.yaml", "kvindexd-redis")
        places = self._places(index)
        toml = "[redis]\n" + "".join(
            f"{name.rpartition('__')[2].lower()} = {json.dumps(value)}\n"
            for name, value in local_environment(redis, places).items()
        )
        (self.folder / f"{index}.toml").write_text(toml + text)
        command, environment = unit(role)
        places["/var/lib/kvindexd"] = str(self.folder)
        log = self.folder / f"{index}.log"
        return Process(local_command(command, places), local_environment(environment, places), log)

    def _unit_sidecar(self) -> Process:
        engine = self.engines[1]
        metrics = self.ports[1][3]
        return self._unit(
            1,
            "sidecar",
            f"""
            [metrics]
            listen = "127.0.0.1:{metrics}"
            [[workers]]
            worker_id = "{NAMES[1]}"
            model = "m"
            address = "10.1.1.2:8000"
            kv_events_endpoint = "{engine.endpoint()}"
            replay_endpoint = "{engine.replay_endpoint()}"
            """,
        )

    def _unit_scorer(self) -> Process:
        grpc_, admin, ext_proc, metrics = self.ports[3]
        return self._unit(
            3,
            "scorer",
            f"""
            [server]
            listen = "127.0.0.1:{grpc_}"
            admin_listen = "127.0.0.1:{admin}"
            [ext_proc]
            listen = "127.0.0.1:{ext_proc}"
            [metrics]
            listen = "127.0.0.1:{metrics}"
            [tls]
            cert_file = "{self.folder}/tls.crt"
            key_file = "{self.folder}/tls.key"
            listeners = ["server", "admin"]
            [auth]
            tokens_file = "{self.folder}/tokens"
            scoring = "open"
            """,
        )

    def answers(self, index: int, path: str) -> bool:
        """Whether a probe succeeds."""
        url = f"http://127.0.0.1:{self.ports[index][3]}{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    def scored(self, index: int) -> float:
        """Calls that a scorer has answered since its start, by its metrics."""
        url = f"http://127.0.0.1:{self.ports[index][3]}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        name = 'kvindexd_score_requests_total{code="OK"} '
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    def until_probed(self, index: int, probe: str, path: Path) -> None:
        """Wait for a probe of the manifests."""
        (shipped,) = containers(path)
        where = shipped[probe]["httpGet"]["path"]
        process = [*self.sidecars, *self.scorers][index]
        try:
            servers.wait_until(lambda: self.answers(index, where), f"{where} of {index}")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{process.said()}") from None

    def started(self, index: int) -> None:
        """Wait until an orchestrator would go on to the next one."""
        if index < 2:
            path = KUBERNETES / "components" / "engine-sidecar" / "sidecar.yaml"
            self.until_probed(index, "startupProbe", path)
        else:
            self.until_probed(index, "readinessProbe", KUBERNETES / "base" / "scorer.yaml")

    def end(self) -> None:
        for process in (*self.scorers, *self.sidecars):
            process.kill()
        self.redis.kill()


def _redis(folder: Path, ca: trustme.CA) -> servers.Server:
    """A Redis by the arguments of the StatefulSet, with TLS in addition, not started."""
    subprocess.run([DEPLOY / "secrets.sh", folder], check=True)
    pair = issue(ca, "localhost", "127.0.0.1")
    (folder / "redis.crt").write_bytes(pair.cert)
    (folder / "redis.key").write_bytes(pair.key)
    valkey = KUBERNETES / "overlays" / "trial" / "valkey.yaml"
    (stateful,) = [d for d in documents(valkey) if d["kind"] == "StatefulSet"]
    args = list(stateful["spec"]["template"]["spec"]["containers"][0]["args"])
    at = args.index("--dir")
    del args[at : at + 2]
    args[args.index("--aclfile") + 1] = str(folder / "users.acl")
    port = servers.free_port()
    tls = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
    files = (
        "--tls-cert-file",
        str(folder / "redis.crt"),
        "--tls-key-file",
        str(folder / "redis.key"),
    )
    return servers.Server(servers.redis_binary(), port, folder, (*args, *tls, *files), plain=False)
