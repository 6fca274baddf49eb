"""What is shipped under deploy/ names only commands, flags and settings that exist."""

from __future__ import annotations

import re
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
