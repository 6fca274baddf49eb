"""What is shipped under deploy/ names only commands, flags and settings that exist."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.config import load

DEPLOY = Path(__file__).parent.parent / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def test_example_configuration_is_valid() -> None:
    config = load(DEPLOY / "config" / "kvindexd.toml", env={}).config
    assert config.workers[0].worker_id == "w0"
    assert config.redis.url


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.stem)
def test_unit_runs_a_command_with_flags_that_exist(unit: Path) -> None:
    text = unit.read_text()
    (command,) = re.findall(r"^ExecStart=\S+/kvindexd (\S+) (.*)$", text, re.M)
    usage = CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "200"}).output
    for flag in re.findall(r"--[a-z-]+", command[1]):
        assert flag in usage, f"{unit.name}: {command[0]} has no {flag}"


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.stem)
def test_unit_sets_variables_that_are_settings(unit: Path) -> None:
    pairs = re.findall(r"^Environment=(KVINDEXD_\w+)=(.*)$", unit.read_text(), re.M)
    assert pairs
    assert load(env=dict(pairs)).config.index.data_dir == "/var/lib/kvindexd"


class _Unit(configparser.RawConfigParser):
    """A unit file; of keys that come several times, the last."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None)
        self.read(path)

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: u.stem)
def test_unit_survives_crashes_and_stops_in_order(unit: Path) -> None:
    service = _Unit(unit)["Service"]
    assert service["Restart"] == "on-failure"
    # What `kvindexd` ends with when its configuration cannot be used: see kvindexd/cli/serve.py.
    assert service["RestartPreventExitStatus"] == "2"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["KillSignal"] == "SIGTERM"
    # `serve` ends its own Valkey, after it has written to it.
    assert service["KillMode"] == "mixed"
    grace = load(env={}).config.server.grace_seconds
    assert float(service["TimeoutStopSec"]) >= 2 * grace
    assert service["StateDirectory"] == "kvindexd"
    assert int(service["LimitNOFILE"]) >= 65536


def test_units_differ_in_their_role_only() -> None:
    texts = {
        re.sub(r"kvindexd (serve|sidecar|scorer) ", "kvindexd ROLE ", text)
        for unit in UNITS
        for text in [re.sub(r"^Description=.*$", "", unit.read_text(), flags=re.M)]
    }
    assert len(texts) == 1


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this host")
def test_units_are_valid_and_confined(tmp_path: Path) -> None:
    """By systemd itself. `security` rates 0 (confined) to 10 (not at all)."""
    copies = []
    for unit in UNITS:
        copies.append(tmp_path / unit.name)
        # The program need not be installed where this runs.
        copies[-1].write_text(unit.read_text().replace("/opt/kvindexd/bin/kvindexd", "/bin/true"))
    command = ["systemd-analyze", "verify", *map(str, copies)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    # Older ones cannot rate a file.
    rate = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager"]
    done = subprocess.run([*rate, str(copies[0])], capture_output=True, text=True, timeout=60)
    if "unrecognized option" not in done.stderr:
        assert done.returncode == 0, done.stdout[-3000:]
