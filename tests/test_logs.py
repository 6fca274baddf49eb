"""Logs: repeats are told once in a while, requests by their ids, and every event is documented."""

from __future__ import annotations

import ast
import asyncio
import functools
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog
from daemon import serving
from test_ext_proc import Fleet

from kvindexd.config import ConfigError
from kvindexd.running import failed
from kvindexd.telemetry import configure_logging, frames_of, name_request, tell_repeats, tell_rest
from kvindexd.telemetry.repeats import LimitRepeats, Repeats

# -- repeats ---------------------------------------------------------------------------------


def lines(repeats: Repeats[str], *times: float, key: str = "k") -> list[str]:
    """What is shown of one line a second from some times on, as "time+suppressed"."""
    shown = []
    for now in times:
        withheld = repeats.admit(key, f"{now:g}", now)
        if withheld is not None:
            shown.append(f"{now:g}+{withheld}")
    return shown


def test_the_first_is_shown_at_once_and_then_one_per_interval() -> None:
    repeats: Repeats[str] = Repeats(10)
    assert lines(repeats, 0, 1, 2, 9.9, 10, 11, 19, 20, 45) == ["0+0", "10+3", "20+2", "45+0"]


def test_when_it_ends_the_rest_is_told() -> None:
    repeats: Repeats[str] = Repeats(10)
    lines(repeats, 0, 1, 2, 3)
    assert repeats.due(9) == []
    assert repeats.due(10) == [("3", 2)]
    assert repeats.due(30) == []
    # Nothing is left of it: the next one is a first one.
    assert lines(repeats, 31) == ["31+0"]
    lines(repeats, 32)
    assert repeats.rest() == [("32", 0)]
    assert repeats.rest() == []


def test_every_line_is_shown_or_counted() -> None:
    repeats: Repeats[str] = Repeats(10)
    told, now = 0, 0.0
    for step in range(1000):
        now += (step * 7 % 13) / 4
        withheld = repeats.admit("k", "x", now)
        told += 0 if withheld is None else 1 + withheld
        if step % 50 == 0:
            told += sum(1 + suppressed for _, suppressed in repeats.due(now))
    told += sum(1 + suppressed for _, suppressed in repeats.rest())
    assert told == 1000


def test_what_is_remembered_is_bounded_and_0_shows_everything() -> None:
    repeats: Repeats[str] = Repeats(10, max_keys=2)
    for key in "abc":
        assert lines(repeats, 0, 1, key=key) == (["0+0"] if key != "c" else ["0+0", "1+0"])
    assert lines(Repeats(0), 0, 0, 0) == ["0+0"] * 3


def test_lines_are_alike_by_event_level_and_worker() -> None:
    now = [0.0]
    limit = LimitRepeats(Repeats(10), lambda: now[0])

    def say(**event: Any) -> dict[str, Any] | None:
        try:
            return dict(limit(None, "x", {"event": "gap", "level": "warning"} | event))
        except structlog.DropEvent:
            return None

    assert say(worker="a#0", first=1)
    assert say(worker="a#0", first=2) is None
    assert say(worker="b#0", first=1)
    assert say(worker="a#0", level="error")
    assert say(worker="a#0", event="other")
    assert say(worker="a#0", state="STALE")
    now[0] = 10.0
    assert say(worker="a#0", first=3) == {
        "event": "gap",
        "level": "warning",
        "worker": "a#0",
        "first": 3,
        "suppressed": 1,
    }
    assert all(say(level="debug") for _ in range(3))


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    configure_logging(stream=io.StringIO())
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:], root.level = before[0], before[1]


def test_repeats_of_ours_and_of_libraries_through_the_whole_chain(out: io.StringIO) -> None:
    configure_logging("json", "info", out, repeat_seconds=60)
    for i in range(5):
        try:
            raise RuntimeError("redis://:s3cret@h")
        except RuntimeError:
            structlog.get_logger().exception("failed", worker="a#0", n=i)
        logging.getLogger("some.library").warning("attempt %d of redis://:s3cret@h", i)
    assert len(out.getvalue().splitlines()) == 2
    tell_rest()
    assert "s3cret" not in out.getvalue()
    first, second, third, fourth = map(json.loads, out.getvalue().splitlines())
    assert (first["n"], "RuntimeError" in first["exception"]) == (0, True)
    assert second["event"] == "attempt 0 of redis://:***@h"
    assert second["logger"] == "some.library"
    assert (third["n"], third["suppressed"], third["worker"]) == (4, 3, "a#0")
    assert (fourth["event"], fourth["suppressed"]) == ("attempt 4 of redis://:***@h", 3)


async def test_what_was_left_out_last_is_told_without_another_line(out: io.StringIO) -> None:
    configure_logging("json", "info", out, repeat_seconds=0.05)
    for i in range(3):
        structlog.get_logger().warning("away", n=i)
    telling = asyncio.create_task(tell_repeats(0.01))
    for _ in range(1000):
        if len(out.getvalue().splitlines()) > 1:
            break
        await asyncio.sleep(0.01)
    telling.cancel()
    last = json.loads(out.getvalue().splitlines()[-1])
    assert (last["n"], last["suppressed"], last["level"]) == (2, 1, "warning")


def test_errors_of_requests_are_logged_without_their_messages(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    try:
        {}["the quokka"]
    except KeyError as e:
        shown = frames_of(e)
        logging.getLogger("grpc._cython.cygrpc").exception("Unexpected [KeyError]")
        logging.getLogger("some.library").exception("failed")
    assert shown.endswith("KeyError")
    assert "test_logs.py" in shown
    of_grpc, of_library = map(json.loads, out.getvalue().splitlines())
    assert of_grpc["exception"] == shown
    # What is not about a request keeps its message.
    assert "KeyError: 'the quokka'" in of_library["exception"]


def test_what_keeps_a_daemon_from_starting_is_said_plainly(
    out: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("json", "info", out)
    taken = OSError("server.listen: cannot bind redis://:s3cret@h")
    assert failed("serve", ExceptionGroup("in a task group", [taken]), started=False) == 1
    assert failed("serve", ConfigError("tracing: no"), started=False) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "kvindexd serve: server.listen: cannot bind redis://:***@h",
        "kvindexd serve: tracing: no",
    ]
    assert not out.getvalue()


def test_a_crash_is_a_line_with_its_traceback_and_without_secrets(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    fault = ExceptionGroup("in a task group", [RuntimeError("redis://:s3cret@h")])
    assert failed("serve", fault, started=False) == 1
    assert failed("serve", OSError("after hours"), started=True) == 1
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["event"] == second["event"] == "crashed"
    assert "RuntimeError: redis://:***@h" in first["exception"]
    assert "after hours" in second["exception"]
    assert "s3cret" not in out.getvalue()


def test_a_daemon_shows_repeats_once_and_the_rest_at_its_end(tmp_path: Path) -> None:
    settings = {"log.repeat_seconds": 600, "metrics.listen": ""}
    with serving(index__data_dir=str(tmp_path), **settings) as daemon:
        daemon.register("a", "tcp://127.0.0.1:9", address="10.0.0.1:8000")
        fleet = Fleet(daemon, {})
        for _ in range(4):
            fleet.buffered(b'{"model": "m", "prompt": "x"}')
        fleet.channel.close()
        daemon.until(lambda: daemon.events("picked_by_load"), "the first is told")
    first, last = daemon.events("picked_by_load")
    assert "suppressed" not in first
    assert last["suppressed"] == 2
    assert daemon.records[-1]["event"] == "stopped"


def test_request_ids_of_clients_cannot_break_a_line(out: io.StringIO) -> None:
    configure_logging("console", "info", out)
    for given in ("ok-1", "a\nevent=forged", "\x1b[31m", "ü", "", "x" * 500):
        structlog.contextvars.clear_contextvars()
        name_request(given)
        structlog.get_logger().info("x")
    seen = out.getvalue().splitlines()
    assert len(seen) == 6
    assert "request_id=ok-1" in seen[0]
    assert not any("request_id" in line for line in seen[1:5])
    assert seen[5].count("x") < 140


# -- the list of events ----------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error"}
LEVELS |= {"exception": "error"}
ADVICE = {"cost", "fix", "action"}


class Logged(NamedTuple):
    """One call of a logger. `event`: a pattern; `levels`: one, or two where it depends."""

    event: str
    levels: frozenset[str]
    advised: bool
    where: str


@functools.cache
def logged() -> list[Logged]:
    """Every call of a logger in the package, by its syntax tree."""
    found = []
    for file in sorted((ROOT / "kvindexd").rglob("*.py")):
        if "testing" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and (levels := levels_of(node.func)):
                keywords = {k.arg for k in node.keywords}
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                event = pattern_of(node.args[0])
                found.append(Logged(event, levels, bool(keywords & ADVICE), where))
    return found


def levels_of(called: ast.expr) -> frozenset[str]:
    """Levels of `log.warning`, `self._log.info` and of a variable `emit`, which is one of two."""
    if isinstance(called, ast.Name) and called.id == "emit":
        return frozenset({"info", "warning"})
    if isinstance(called, ast.Attribute) and called.attr in LEVELS:
        owner = ast.unparse(called.value)
        if owner in ("log", "self._log"):
            return frozenset({LEVELS[called.attr]})
    return frozenset()


def pattern_of(event: ast.expr) -> str:
    if isinstance(event, ast.JoinedStr):
        return "".join(
            re.escape(p.value) if isinstance(p, ast.Constant) else "[a-z_]+" for p in event.values
        )
    assert isinstance(event, ast.Constant), ast.dump(event)
    return re.escape(event.value)


def documented() -> dict[str, set[str]]:
    """Event -> its levels, by docs/logs.md."""
    found: dict[str, set[str]] = {}
    for row in (ROOT / "docs" / "logs.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0].strip("| ").startswith("`"):
            for event in re.findall(r"`(\w+)`", cells[0]):
                assert event not in found, f"{event} is there twice"
                found[event] = set(cells[1].split(", "))
                assert all(cells), row
    return found


def test_every_event_is_in_the_document_and_every_documented_one_is_logged() -> None:
    known = documented()
    used: dict[str, set[str]] = {}
    for one in logged():
        names = [name for name in known if re.fullmatch(one.event, name)]
        assert names, f"{one.where}: {one.event} is not in docs/logs.md; add when, and what to do"
        for name in names:
            used.setdefault(name, set()).update(one.levels)
    assert known.keys() == used.keys()
    for name, levels in known.items():
        assert levels <= used[name], f"{name} is documented as {levels}, logged as {used[name]}"
        if not name.startswith("link_"):
            assert levels == used[name], f"{name}: documented {levels}, logged {used[name]}"


def test_events_are_named_alike_and_trouble_says_what_it_costs_or_what_to_do() -> None:
    for one in logged():
        assert re.fullmatch(r"[a-z_\[\]+\\-]+", one.event), one
        if one.levels <= {"warning", "error"}:
            assert one.advised, f"{one.where}: {one.event}: add cost=, fix= or action="
