"""`kvindexd top`: the fleet, live."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import grpc
import typer
from rich.live import Live

from kvindexd.cli.client import DEFAULT_SERVER, ServerOption, channel, explain
from kvindexd.cli.keys import keyboard
from kvindexd.cli.output import JsonOption, console, fail, note, plain, print_json
from kvindexd.cli.top_page import screen
from kvindexd.cli.top_view import (
    History,
    Name,
    Snapshot,
    Sort,
    View,
    name_of,
    ordered,
    pressed,
    row,
    title,
)
from kvindexd.v1 import index_pb2 as pb

_TIMEOUT = 5.0
"""Seconds that one call may take."""
_GLANCE = 0.05
"""Seconds between two looks for an answer that is awaited."""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("top")(top)


def top(
    worker: Annotated[str, typer.Option(help="Only this worker, in full.")] = "",
    dp_rank: Annotated[int, typer.Option("--dp-rank", "--rank", min=0, help="Its rank.")] = 0,
    model: Annotated[str, typer.Option(help="Only this model's workers.")] = "",
    namespace: Annotated[str, typer.Option(help="Only this namespace; default: all.")] = "",
    sort: Annotated[Sort, typer.Option(help="Order; the most, or worst, first.")] = Sort.NAME,
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end; rates need two looks.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show the workers live: state, blocks, event rates, lag, losses, hit ratio and picks.

    On a terminal keys sort, mark a worker and open its page. --json prints one object per look,
    each on a line. Hit ratio and picks are those of the server that is asked. Ctrl-C ends it.
    """
    page = (namespace, worker, dp_rank) if worker else None
    watched = Watched(server, pb.ListWorkersRequest(model=model, namespace=namespace), page)
    view = View(sort=sort, reverse=reverse, page=page)
    snapshot = watched.poll()
    if isinstance(snapshot, str):
        fail(snapshot)
    if page is not None and page not in snapshot.workers:
        fail(f"worker {title(page)} is not registered; see `kvindexd workers list`")
    try:
        if as_json or once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _stream(watched, snapshot, view, None if once else interval, as_json)
        else:
            _interactive(watched, snapshot, view, interval)
    except KeyboardInterrupt:
        pass


class Answer(NamedTuple):
    """What a server said. `at`: seconds, monotonic."""

    at: float
    workers: Sequence[pb.Worker]
    stats: pb.IndexStatsResponse


class Watched:
    """A server that is asked again and again."""

    def __init__(self, server: str, request: pb.ListWorkersRequest, only: Name | None) -> None:
        request.include_stale = True
        self._server = server
        self._request = request
        self._only = only
        self.history = History()

    def poll(self) -> Snapshot | str:
        """A look at the fleet, or what went wrong."""
        return self.take(self.ask())

    def ask(self) -> Answer | str:
        """What the server says, or what went wrong; may run in another thread."""
        try:
            with channel(self._server) as client:
                workers = client.admin.ListWorkers(self._request, timeout=_TIMEOUT).workers
                stats = client.admin.IndexStats(pb.IndexStatsRequest(), timeout=_TIMEOUT)
        except grpc.RpcError as error:
            return explain(self._server, error)
        return Answer(time.monotonic(), workers, stats)

    def take(self, answer: Answer | str) -> Snapshot | str:
        """An answer as a look at the fleet, which counts in the rates from now on."""
        if isinstance(answer, str):
            return answer
        self.history.add(answer.at, answer.workers)
        named = {name_of(w): w for w in answer.workers if self._only in (None, name_of(w))}
        rows = [row(w, self.history) for w in named.values()]
        return Snapshot(time.time(), rows, named, answer.stats)


def _stream(
    watched: Watched, snapshot: Snapshot, view: View, interval: float | None, as_json: bool
) -> None:
    """Print look after look, until interrupted; with no interval the first one alone."""
    out, problem = console(), ""
    while True:
        if as_json:
            print_json(_as_json(snapshot, view), line=True)
        else:
            out.print(screen(snapshot, watched.history, view, None, out.width))
        if interval is None:
            return
        while True:
            time.sleep(interval)  # what --interval asks for
            found = watched.poll()
            if isinstance(found, Snapshot):
                snapshot, problem = found, ""
                break
            if found != problem:
                note(f"{found}; trying again")
                problem = found


def _as_json(snapshot: Snapshot, view: View) -> dict[str, Any]:
    rows = ordered(snapshot.rows, view.sort, view.reverse)
    data = snapshot._replace(rows=rows).as_json()
    if view.page is not None and (worker := snapshot.workers.get(view.page)) is not None:
        data["worker"] = plain(worker)
    return data


def _interactive(watched: Watched, snapshot: Snapshot, view: View, interval: float) -> None:
    out, problem = console(), ""

    def shown() -> Any:
        return screen(snapshot, watched.history, view, out.height, out.width, problem)

    asked: Future[Answer | str] | None = None
    due = time.monotonic() + interval
    with (
        # A server that is slow to answer must not make keys slow.
        ThreadPoolExecutor(1) as asking,
        keyboard() as read,
        Live(shown(), console=out, screen=True, auto_refresh=False) as live,
    ):
        while not view.ended:
            for key in read(_GLANCE if asked is not None else due - time.monotonic()):
                view = pressed(view, key, ordered(snapshot.rows, view.sort, view.reverse))
            if asked is not None and asked.done():
                found = watched.take(asked.result())
                asked = None
                if isinstance(found, Snapshot):
                    snapshot, problem = found, ""
                else:
                    problem = f"{found}; what is shown is old"
            if asked is None and time.monotonic() >= due:
                due = time.monotonic() + interval
                asked = None if view.paused else asking.submit(watched.ask)
            live.update(shown(), refresh=True)
