"""A rolling restart of everything that deploy/ ships, under continuous questions.

Two engines; a sidecar by the manifests and one by its systemd unit; a scorer by the production
overlay (TLS, tokens) and one by its unit; a Redis with TLS and the ACL user of deploy/secrets.sh,
started with the arguments of the shipped StatefulSet. A client asks both scorers in turns, as
docs/deploy.md tells gateways to, while each part is stopped and started again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
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
from reliability import prompt, stored

from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

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


class Asking:
    """A gateway: one channel over both scorers, by what docs/deploy.md tells it to use."""

    def __init__(self, fleet: Fleet, config: str) -> None:
        addresses = ",".join(f"127.0.0.1:{fleet.ports[i][0]}" for i in (2, 3))
        options = [
            ("grpc.service_config", config),
            ("grpc.ssl_target_name_override", "localhost"),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        tls = grpc.ssl_channel_credentials(fleet.ca.cert_pem.bytes())
        self.channel = grpc.secure_channel(f"ipv4:{addresses}", tls, options)
        self.published = 0
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.fleet = fleet
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, daemon=True),
            threading.Thread(target=self._publish, daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(10)

    def _publish(self) -> None:
        """The engines go on: one more block of one chain each time, on both."""
        for n in itertools.count():
            self.published = n + 1
            for engine in self.fleet.engines:
                engine.publish([stored(n)])
            if self._ending.wait(0.02):
                return

    def score(self, blocks: int) -> dict[str, int]:
        """Blocks that each worker is credited with. Raises grpc.RpcError."""
        asked = pb.Prompt(model="m", tokens=pb.TokenIds(ids=prompt(blocks)))
        request = pb.ScoreWorkersRequest(prompt=asked)
        answer = rpc.KVIndexStub(self.channel).ScoreWorkers(request, timeout=5)
        return {s.worker_id: s.matched_tokens // 16 for s in answer.scores}

    def _ask(self) -> None:
        while not self._ending.is_set():
            before = self.published
            try:
                found = self.score(before + 50)
            except grpc.RpcError as e:
                self.codes[f"{e.code().name}: {e.details()}"] += 1
                continue
            self.codes["OK"] += 1
            after = self.published
            if any(blocks > after for blocks in found.values()) or set(found) - set(NAMES):
                self.wrong.append(f"{found} while at most {after} were published")
            time.sleep(0.002)


def service_config() -> str:
    """The JSON that docs/deploy.md gives gateways."""
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    block = text.partition("<!-- service config -->")[2].partition("```json\n")[2]
    return json.dumps(json.loads(block.partition("```")[0]))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with FakeEngine() as one, FakeEngine() as two:
        made = Fleet(tmp_path, [one, two])
        try:
            made.redis.start()
            for process in (*made.sidecars, *made.scorers):
                process.start()
            for index in range(4):
                made.started(index)
            yield made
        finally:
            made.end()


def test_nothing_fails_while_every_part_is_restarted(fleet: Fleet) -> None:
    asking = Asking(fleet, service_config())
    _until_both(asking, 0)
    asking.start()
    try:
        for index, process in enumerate([*fleet.sidecars, *fleet.scorers]):
            _advance(asking, 20)
            process.stop()
            _advance(asking, 20)
            process.start()
            fleet.started(index)
            if index < 2:
                _until_both(asking, asking.published)
        _advance(asking, 20)
        fleet.redis.stop()
        _advance(asking, 20)
        fleet.redis.start()
        _until_both(asking, asking.published)
    finally:
        asking.stop()
    assert set(asking.codes) == {"OK"}, asking.codes
    assert asking.codes["OK"] > 200
    assert not asking.wrong, asking.wrong[:5]
    _until_both(asking, asking.published)
    for index in (2, 3):
        assert fleet.scored(index) > 20, "it took its share after it was started again"
        assert _alone(fleet, index, asking.published) == dict.fromkeys(NAMES, asking.published)
    _only_an_admin_steers(fleet)


def _advance(asking: Asking, answers: int) -> None:
    """Go on only after the client had so many more answers, or failures."""
    goal = asking.codes.total() + answers
    servers.wait_until(lambda: asking.codes.total() >= goal, "the client goes on asking")


def _until_both(asking: Asking, blocks: int) -> None:
    """Wait until both workers are credited with so many blocks."""

    def both() -> bool:
        try:
            found = asking.score(max(1, blocks))
        except grpc.RpcError as e:
            raise AssertionError(f"{e.code()}: {e.details()}") from None
        return set(found) == set(NAMES) and min(found.values()) >= blocks

    servers.wait_until(both, f"both workers with {blocks} blocks")


def _channel(fleet: Fleet, port: int) -> grpc.Channel:
    tls = grpc.ssl_channel_credentials(fleet.ca.cert_pem.bytes())
    return grpc.secure_channel(f"localhost:{port}", tls)


def _alone(fleet: Fleet, index: int, blocks: int) -> dict[str, int]:
    """What one scorer says at the end."""
    request = pb.ScoreWorkersRequest(
        prompt=pb.Prompt(model="m", tokens=pb.TokenIds(ids=prompt(blocks + 1)))
    )
    with _channel(fleet, fleet.ports[index][0]) as channel:
        scores = rpc.KVIndexStub(channel).ScoreWorkers(request, timeout=5).scores
    return {s.worker_id: s.matched_tokens // 16 for s in scores}


def _only_an_admin_steers(fleet: Fleet) -> None:
    """Administration is on its own loopback port, and asks for the token of the file."""
    request: Any = pb.ListWorkersRequest()
    for index in (2, 3):
        with _channel(fleet, fleet.ports[index][0]) as channel, pytest.raises(grpc.RpcError) as e:
            rpc.KVIndexAdminStub(channel).ListWorkers(request, timeout=5)
        assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with _channel(fleet, fleet.ports[index][1]) as channel:
            admin = rpc.KVIndexAdminStub(channel)
            with pytest.raises(grpc.RpcError) as e:
                admin.ListWorkers(request, timeout=5)
            assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED
            metadata = [("authorization", f"Bearer {TOKEN}")]
            listed = admin.ListWorkers(request, timeout=5, metadata=metadata).workers
            assert {w.worker_id for w in listed} == set(NAMES)
