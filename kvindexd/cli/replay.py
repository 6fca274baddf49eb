"""`kvindexd replay`: a capture played back on the wire, as the engine did."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import grpc
import msgspec
import typer

from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.player import Played, Player, Settings, source_of
from kvindexd.capturing.reader import open_capture
from kvindexd.cli.client import CALL_TIMEOUT, channel, connect, explain
from kvindexd.cli.output import JsonOption, fail, note, print_json
from kvindexd.cli.progress import progress
from kvindexd.ingest.sockets import TransportError, check_endpoint
from kvindexd.registration import Registration
from kvindexd.rpc.codec import worker_message
from kvindexd.v1 import index_pb2 as pb

_WILDCARDS = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("replay")(replay)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Capture file or folder.")],
    bind: Annotated[str, typer.Option(help="Where to publish; port 0 = any.")],
    replay_bind: Annotated[str, typer.Option(help="Where to answer replay requests.")] = "",
    speed: Annotated[
        float, typer.Option(min=0, help="2 = twice as fast; 0 = as fast as possible.")
    ] = 1.0,
    loop: Annotated[
        bool, typer.Option("--loop", help="Begin again at the end, as a restarted engine.")
    ] = False,
    wait: Annotated[
        int, typer.Option(min=0, help="Subscribers to wait for before the first frame.")
    ] = 0,
    patience: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 60.0,
    hold: Annotated[
        bool, typer.Option("--hold", help="Stay up behind the last frame, until Ctrl-C.")
    ] = False,
    source: Annotated[str, typer.Option(help="Which publisher to play, if there are more.")] = "",
    server: Annotated[
        str,
        typer.Option("--register", metavar="ADDR", help="Register with this kvindexd meanwhile."),
    ] = "",
    worker_id: Annotated[
        str, typer.Option(help="Register as; default: the recorded name and -replay.")
    ] = "",
    model: Annotated[str, typer.Option(help="Register for; default: as recorded.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Play a capture as a publisher, as the engine did that it was taken from.

    A file that was cut short is played up to the cut. Exit status 1 if the file cannot be read, an
    address cannot be bound, or the subscribers to wait for do not come.
    """
    if server and bind.startswith(_WILDCARDS):
        raise typer.BadParameter(
            "with --register, name the address that the server connects to, such as "
            "tcp://10.0.0.5:5557",
            param_hint="--bind",
        )
    settings = Settings(
        bind=_bindable(bind, "--bind"),
        replay_bind=_bindable(replay_bind, "--replay-bind") if replay_bind else "",
        speed=speed,
        loop=loop,
        subscribers=max(wait, int(bool(server))),
        patience=patience,
    )
    try:
        found = open_capture(file)
        src = source_of(found, source)
        player = Player(found, src, settings)
    except CaptureError as e:
        fail(str(e))
    except OSError as e:
        fail(e.strerror or str(e))
    recorded = found.header.sources[src]
    try:
        # A name of its own: the worker itself may well be registered there.
        worker = msgspec.structs.replace(
            recorded,
            worker_id=worker_id or f"{recorded.worker_id}-replay",
            model=model or recorded.model,
        )
        played = _play(player, worker, server, hold)
    except (CaptureError, TimeoutError) as e:
        fail(str(e))
    finally:
        player.close()
    _tell_played(file, played, found.cut, as_json)


def _bindable(endpoint: str, option: str) -> str:
    try:
        return check_endpoint(endpoint, bind=True)
    except TransportError as e:
        raise typer.BadParameter(str(e), param_hint=option) from None


def _play(player: Player, worker: Registration, server: str, hold: bool) -> Played:
    publisher = player.publisher
    note(f"publishing on {publisher.endpoint}, replay on {publisher.replay_endpoint or 'nothing'}")
    with _stopped_by_signals(player), _registration(player, worker, server):
        with progress() as show:
            played = player.play(lambda p: show(_said_played(p)))
        if hold:
            player.hold()
    return played


@contextmanager
def _stopped_by_signals(player: Player) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the playing in order while inside."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: player.stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _registration(player: Player, recorded: Registration, server: str) -> Iterator[None]:
    """Registered with a server while inside, if one is given."""
    if not server:
        yield
        return
    worker = worker_message(
        msgspec.structs.replace(
            recorded,
            address=recorded.address or "127.0.0.1:0",
            kv_events_endpoint=player.publisher.endpoint,
            replay_endpoint=player.publisher.replay_endpoint or "",
            bind_events=False,
        )
    )
    with connect(server) as client:
        client.admin.RegisterWorker(pb.RegisterWorkerRequest(worker=worker), timeout=CALL_TIMEOUT)
    try:
        yield
    finally:
        _deregister(server, worker)


def _deregister(server: str, worker: pb.Worker) -> None:
    request = pb.DeregisterWorkerRequest(
        worker_id=worker.worker_id, dp_rank=worker.dp_rank, namespace=worker.namespace
    )
    with channel(server) as client:
        try:
            client.admin.DeregisterWorker(request, timeout=CALL_TIMEOUT)
        except grpc.RpcError as e:
            note(f"{worker.worker_id} is still registered: {explain(server, e)}")


def _said_played(p: Played) -> str:
    restarts = f", {p.restarts:,} restarts" if p.restarts else ""
    return f"{p.frames:,} frames sent{restarts}"


def _tell_played(file: Path, played: Played, cut: str, as_json: bool) -> None:
    if as_json:
        print_json(played._asdict() | {"cut": cut})
    else:
        typer.echo(f"{file}: {_said_played(played)}" + (f"; {cut}" if cut else ""))
