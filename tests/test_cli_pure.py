"""The command line's own logic, without a server: rates, order, keys, comparisons, help."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvindexd.cli import output
from kvindexd.cli.client import explain
from kvindexd.cli.compare import Difference, Incomparable, compare, nearest, sentence
from kvindexd.cli.explain_page import print_explanation
from kvindexd.cli.keys import split
from kvindexd.cli.main import app
from kvindexd.cli.options import parse_prompt
from kvindexd.cli.tail import line
from kvindexd.cli.top_page import screen
from kvindexd.cli.top_view import (
    KEYS,
    History,
    Name,
    Row,
    Sample,
    Snapshot,
    Sort,
    View,
    name_of,
    ordered,
    pressed,
    rate,
    row,
    window,
)
from kvindexd.v1 import index_pb2 as pb


def worker(worker_id: str, state: int = pb.LIVE, **more: Any) -> pb.Worker:
    return pb.Worker(worker_id=worker_id, model="m", state=cast(Any, state), last_seq=1, **more)


def rows(*workers: pb.Worker) -> list[Row]:
    history = History()
    history.add(0.0, workers)
    return [row(w, history) for w in workers]


def names(found: list[Row]) -> list[str]:
    return [r.name[1] for r in found]


# -- rates ------------------------------------------------------------------------------------


def test_a_rate_is_what_counters_grew_by_over_the_time_between() -> None:
    before, after = Sample(10.0, {"a": 5, "b": 1}), Sample(12.0, {"a": 9, "b": 3, "c": 4})
    assert rate(before, after, "a") == 2.0
    assert rate(before, after, "a", "b", "c") == 5.0
    assert rate(before, after, "never") == 0.0


def test_no_rate_where_it_cannot_be_said() -> None:
    assert rate(Sample(1.0, {}), Sample(1.0, {"a": 1}), "a") is None
    assert rate(Sample(1.0, {"a": 7}), Sample(2.0, {"a": 2}), "a") is None


def test_rates_cover_a_window_and_forget_workers_that_are_gone() -> None:
    history = History(window=4.0)
    name = ("", "w", 0)
    history.add(0.0, [worker("w", counters={"event:BlockStored": 0})])
    assert history.rate(name, "event:BlockStored") is None
    # Counters are refreshed at every other poll only: the rate does not jump between 0 and 2.
    for at, stores in ((1.0, 0), (2.0, 4), (3.0, 4), (4.0, 8), (5.0, 8), (6.0, 12)):
        history.add(at, [worker("w", counters={"event:BlockStored": stores})])
    assert history.rate(name, "event:BlockStored") == pytest.approx(2.0)
    history.add(7.0, [worker("other")])
    assert history.rate(name, "event:BlockStored") is None


def test_a_row_of_a_worker() -> None:
    counters = {
        "event:BlockStored": 40, "filtered:mamba": 3, "filtered:cross_attention": 4,
        "dropped:bad_seq": 1, "decode_errors": 2, "gaps": 5, "orphans": 6, "picks": 7,
        "pick_prompt_tokens": 200, "pick_reusable_tokens": 50, "evidence_age_ms": 9,
        "outcome_prompt_tokens": 100, "outcome_cached_tokens": 20, "apply_lag_ms": 8,
    }  # fmt: skip
    (found,) = rows(worker("w", counters=counters, blocks={"device": 10, "host": 2}))
    assert (found.filtered, found.dropped, found.gaps, found.orphans) == (7, 3, 5, 6)
    assert (found.hit, found.reported, found.picks) == (0.25, 0.2, 7)
    assert (found.blocks, found.evidence_ms, found.lag_ms, found.stores) == (12, 9, 8, None)
    (fresh,) = rows(pb.Worker(worker_id="x", last_seq=-1))
    assert (fresh.event_ms, fresh.evidence_ms, fresh.hit, fresh.lag_ms) == (None, None, None, None)


# -- order and keys ---------------------------------------------------------------------------

FLEET = (
    worker("b", counters={"gaps": 1}, blocks={"device": 5}),
    worker("a", state=pb.STALE, counters={"gaps": 1}),
    worker("c", state=pb.SYNCING, counters={"gaps": 9, "evidence_age_ms": 4}),
)


def test_the_most_or_the_worst_comes_first() -> None:
    found = rows(*FLEET)
    assert names(ordered(found, Sort.NAME)) == ["a", "b", "c"]
    assert names(ordered(found, Sort.STATE)) == ["a", "c", "b"]
    assert names(ordered(found, Sort.GAPS)) == ["c", "a", "b"]
    assert names(ordered(found, Sort.GAPS, reverse=True)) == ["a", "b", "c"]
    assert names(ordered(found, Sort.BLOCKS)) == ["b", "a", "c"]
    assert names(ordered(found, Sort.AGE)) == ["a", "b", "c"]  # never heard of is oldest


def test_every_order_has_a_key_and_can_be_made() -> None:
    assert sorted(KEYS.values()) == sorted(Sort)
    for sort in Sort:
        assert len(ordered(rows(*FLEET), sort)) == 3


def test_keys_sort_mark_open_a_page_and_end() -> None:
    shown = ordered(rows(*FLEET), Sort.NAME)
    view = View()
    for key, expected in (
        ("g", View(sort=Sort.GAPS)),
        ("g", View(sort=Sort.GAPS, reverse=True)),
        ("r", View(sort=Sort.GAPS)),
        ("down", View(sort=Sort.GAPS, marked=("", "a", 0))),
        ("j", View(sort=Sort.GAPS, marked=("", "b", 0))),
        ("up", View(sort=Sort.GAPS, marked=("", "a", 0))),
        ("up", View(sort=Sort.GAPS, marked=("", "a", 0))),
        ("enter", View(sort=Sort.GAPS, marked=("", "a", 0), page=("", "a", 0))),
        ("n", View(sort=Sort.GAPS, marked=("", "a", 0), page=("", "a", 0))),  # no order on a page
        ("escape", View(sort=Sort.GAPS, marked=("", "a", 0))),
        ("space", View(sort=Sort.GAPS, marked=("", "a", 0), paused=True)),
        ("?", View(sort=Sort.GAPS, marked=("", "a", 0), paused=True)),
        ("q", View(sort=Sort.GAPS, marked=("", "a", 0), paused=True, ended=True)),
    ):
        view = pressed(view, key, shown)
        assert view == expected, key
    assert pressed(View(), "enter", []) == View()
    assert pressed(View(), "enter", shown).page == ("", "a", 0)


def test_keys_of_a_terminal() -> None:
    assert split("g\x1b[A\x1b[Bq \r\x1b") == ["g", "up", "down", "q", "space", "enter", "escape"]


def test_the_marked_row_stays_on_the_screen() -> None:
    many = rows(*(worker(f"w{i:02}") for i in range(50)))
    marked: Name = ("", "w30", 0)
    shown = window(many, marked, 10)
    assert len(shown) == 10
    assert marked in [r.name for r in shown]
    assert window(many, None, 10) == many[:10]
    assert window(many, ("", "w49", 0), 10) == many[40:]
    assert window(many, marked, 99) == many


def rendered(what: Any, width: int = 220) -> str:
    console = Console(width=width, record=True, markup=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(what)
    return console.export_text()


def test_the_screen_shows_the_fleet_or_a_worker() -> None:
    workers = [worker("a", counters={"picks": 1, "pick_prompt_tokens": 4}), *FLEET[:1]]
    history = History()
    history.add(0.0, workers)
    found = Snapshot(
        0.0,
        [row(w, history) for w in workers],
        {name_of(w): w for w in workers},
        pb.IndexStatsResponse(blocks=7, replica_lag=3),
    )
    text = rendered(screen(found, history, View(sort=Sort.GAPS), 40, 220, "no answer"))
    assert "2 worker ranks, 2 LIVE; 7 blocks" in text
    assert "3 feed entries behind" in text
    assert "no answer" in text
    assert "GAPS*" in text
    assert "q)uit" in text
    page = rendered(screen(found, history, View(page=("", "a", 0)), None, 220))
    assert "pick_prompt_tokens" in page
    assert "GAPS" not in page
    gone = rendered(screen(found, history, View(page=("", "gone", 0)), None, 220))
    assert "not registered any more" in gone


@pytest.mark.parametrize("width", [80, 100, 120, 160, 220])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_lines(width: int) -> None:
    workers = [worker("a-name-of-some-length", detail="connected to " + 90 * "x"), *FLEET]
    history = History()
    history.add(0.0, workers)
    found = Snapshot(
        0.0,
        [row(w, history) for w in workers],
        {name_of(w): w for w in workers},
        pb.IndexStatsResponse(),
    )
    lines = rendered(screen(found, history, View(), None, width), width).splitlines()[2:]
    assert len(lines) == 1 + len(workers)
    header = lines[0].split()
    assert header[:2] == ["WORKER*", "STATE"]
    assert "STORES/S" in header
    assert ("DETAIL" in header) == (width >= 220)


# -- tail and explain -------------------------------------------------------------------------


def test_lines_of_events() -> None:
    stored = pb.TailWorkerResponse(
        seq=7, ts=1.5, type="BlockStored", group=1, kind="mamba", decision="ignored",
        reason="groups of kind 'mamba' are not indexed", blocks=2, tokens=32, tier="device",
        medium="GPU", block_size=16, lora_name="sql",
    )  # fmt: skip
    text = line(stored).plain
    assert "group 1 mamba, 2 blocks of 16, 32 tokens, device (GPU), adapter sql" in text
    assert text.endswith("filtered: ignored  (groups of kind 'mamba' are not indexed)")
    assert ".500  " in text
    cleared = line(pb.TailWorkerResponse(type="AllBlocksCleared", decision="applied"))
    assert cleared.plain.split()[-3:] == ["cleared", "kept:", "applied"]
    assert (
        "kept: parked" in line(pb.TailWorkerResponse(type="BlockStored", decision="parked")).plain
    )


def test_an_explanation_says_where_each_group_stops_and_where_the_prompt_leaves() -> None:
    group = pb.Group(idx=0, kind="full_attention", block_size=16, treated_as="main")
    state = pb.Group(idx=3, kind="mamba", block_size=64, treated_as="auxiliary")
    answer = pb.ExplainResponse(
        workers=[
            pb.WorkerExplanation(
                score=pb.WorkerScore(worker_id="w", matched_tokens=48, reason="group 3 stops it"),
                groups=[
                    pb.GroupRun(group=group, held=bytes([1, 2, 3, 0]), stops_at=3, why="not held"),
                    pb.GroupRun(group=state, held=bytes([0]), stops_at=0, why="no state"),
                ],
            )
        ],
        divergence=pb.Divergence(
            held_tokens=0,
            before_token=1,
            detail="no worker holds the first block",
            variations=[
                pb.PromptVariation(
                    change="tokens_dropped",
                    detail="without its first token",
                    matched_tokens=48,
                    workers=["w", "x#1"],
                )
            ],
            tried=["this"],
            unknown=["that"],
        ),
    )
    console = Console(width=200, record=True, markup=False, file=open(os.devnull, "w"))  # noqa: SIM115
    print_explanation(console, answer)
    lines = console.export_text().splitlines()
    at = next(i for i, text in enumerate(lines) if "█▓▒·" in text)
    assert lines[at + 1].index("^") == lines[at].index("·")
    assert lines[at + 2].strip() == "stops at block 3 (token 48): not held"
    text = "\n".join(lines)
    assert "group 3 mamba, auxiliary, 1 blocks of 64" in text
    assert "held without its first token: 48 tokens on w, x#1" in text
    assert "first differing token, if one differs: position 0" in text
    assert "not known: that" in text


# -- comparing --------------------------------------------------------------------------------


def tokens(*ids: int) -> pb.Prompt:
    return pb.Prompt(tokens=pb.TokenIds(ids=ids))


def test_token_ids_part_at_a_position_and_in_a_block() -> None:
    found = compare(tokens(*range(40)), tokens(*range(37), 99))
    assert found == Difference("tokens", 37, (40, 38))
    assert found.block(16) == (2, 32, 47)
    assert "first at token 37 (of 40 here, 38 there), in unit 2 of 16 tokens (32 to 47)" in (
        sentence("f", found)
    )
    assert compare(tokens(1, 2), tokens(1, 2)).equal
    assert compare(tokens(), tokens()).equal
    ahead = compare(tokens(1, 2), tokens(1, 2, 3))
    assert (ahead.at, ahead.equal) == (2, False)
    assert "the prompt is the beginning of the other" in sentence("f", ahead)
    assert compare(tokens(5, 1), tokens(1)).at == 0


def test_texts_and_bodies_are_compared_in_their_own_terms() -> None:
    assert compare(parse_prompt("abcd"), parse_prompt("abX")).at == 2
    one = {"messages": [{"role": "user", "content": "hello"}], "model": "m"}
    other = {"messages": [{"role": "user", "content": "help"}], "model": "m"}
    found = compare(parse_prompt(json.dumps(one)), parse_prompt(json.dumps(other)))
    assert (found.form, found.where) == ("fields", "messages[0].content, character 3")
    assert compare(parse_prompt(json.dumps(one)), parse_prompt(json.dumps(one))).equal
    longer = {"messages": [{"role": "user", "content": "hello"}] * 2, "model": "m"}
    found = compare(parse_prompt(json.dumps(one)), parse_prompt(json.dumps(longer)))
    assert found.where == "messages (1 elements in the first, 2 in the second)"
    extra = one | {"temperature": True}
    found = compare(parse_prompt(json.dumps(one)), parse_prompt(json.dumps(extra)))
    assert found.where == "temperature (only in the second)"
    with pytest.raises(Incomparable, match="token ids cannot be compared with text"):
        compare(tokens(1), parse_prompt("text"))


def test_the_nearest_of_several_goes_along_furthest() -> None:
    prompt = tokens(1, 2, 3, 4)
    others = [tokens(1, 9), tokens(1, 2, 3, 9), tokens(7)]
    assert nearest([compare(prompt, o) for o in others]) == 1
    assert nearest([compare(prompt, o) for o in [*others, prompt]]) == 3


# -- help, completion, terminals --------------------------------------------------------------


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(group, "commands", {})
    for name, command in below.items():
        yield from commands(command, (*path, name))
    if path and (not below or group.invoke_without_command):
        yield path, group


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", sorted(COMMANDS), ids=" ".join)
def test_every_commands_help_ends_with_an_example_that_parses(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = COMMANDS[path]
    examples = [part for part in (command.epilog or "").split("\n\n") if "kvindexd" in part]
    assert examples, f"{' '.join(path)}: no example; see kvindexd/cli/examples.py"
    assert any(f"kvindexd {' '.join(path)}" in e for e in examples), examples
    monkeypatch.setenv("COLUMNS", "200")
    context = typer.Context(command, info_name=path[-1], **command.context_settings)
    if command.get_help_option_names(context):  # else --help is handed on
        shown = command.get_help(context) + capsys.readouterr().out
        assert examples[0] in " ".join(shown.split())
    for example in examples:
        words = example.split("kvindexd ", 1)[1].split("|")[0].split(">")[0].split()
        # Parsed, not run: an option that was renamed fails here.
        command.make_parser(context).parse_args(words[len(path) :])


def test_completion_knows_commands_and_options() -> None:
    def completed(words: str, at: int) -> str:
        env = {
            "_KVINDEXD_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(at),
        }
        return CliRunner().invoke(app, [], env=env, prog_name="kvindexd").stdout

    assert completed("kvindexd wor", 1).split() == ["workers"]
    assert set(completed("kvindexd workers d", 2).split()) == {"drain"}
    assert "--against" in completed("kvindexd explain --a", 2).split()
    assert completed("kvindexd top --sort ga", 3).split() == ["gaps"]


def test_completion_is_installed_and_shown(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="kvindexd")
    assert "_KVINDEXD_COMPLETE=complete_bash" in shown.output
    done = CliRunner().invoke(app, ["--install-completion", "bash"], prog_name="kvindexd")
    assert done.exit_code == 0, done.output
    assert "_KVINDEXD_COMPLETE" in (tmp_path / ".bash_completions" / "kvindexd.sh").read_text()


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, stream: str) -> Iterator[Any]:
    """Make a standard stream a terminal; yields a call that gives what was written there."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as written:
        monkeypatch.setattr(sys, stream, written)

        def read() -> str:
            written.flush()
            return os.read(master, 65536).decode()

        yield read
    os.close(master)


def test_colour_on_a_terminal_only_and_not_against_the_users_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.console().print(output.state_text("LIVE"))
    assert capsys.readouterr().out == "LIVE\n"
    with terminal(monkeypatch, "stdout") as read:
        output.console().print(output.state_text("LIVE"))
        assert "\x1b[32mLIVE" in read()
        monkeypatch.setenv("NO_COLOR", "1")
        output.console().print(output.state_text("LIVE"))
        assert "\x1b[32m" not in read()


def test_a_bar_on_a_terminal_for_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "_PATIENCE", 0.0)
    with output.progress("reading") as advance:
        advance(1, 2)
    assert capsys.readouterr().err == ""
    with terminal(monkeypatch, "stderr") as read:
        shown = ""
        with output.progress("reading") as advance:
            advance(1, 2)
            until = time.monotonic() + 30
            while not ("reading" in shown and "50%" in shown) and time.monotonic() < until:
                shown += read()
        assert "reading" in shown
        assert "50%" in shown
        monkeypatch.setattr(output, "_PATIENCE", 60.0)
        with output.progress("quick"):
            pass
        sys.stderr.write("end")
        assert "quick" not in read()


class _Failed(grpc.RpcError):
    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("details", "mine"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", True),
        ("errors resolving nosuch.invalid:1: [Domain name not found]", True),
        ("prompt.text: the engine's /tokenize does not answer: Connection refused", False),
    ],
)
def test_a_daemon_that_cannot_reach_an_engine_is_not_called_unreachable(
    details: str, mine: bool
) -> None:
    said = explain("a:1", _Failed(details))
    assert said.startswith("cannot reach kvindexd at a:1") if mine else details in said
