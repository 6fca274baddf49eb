"""`kvindexd capture`: an engine's event stream, frame by frame, to a file."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from kvindexd._version import __version__
from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.masking import Mask
from kvindexd.capturing.recorder import Bounds, Recorder, Status, Target
from kvindexd.capturing.records import Header
from kvindexd.capturing.writer import CaptureWriter
from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.output import JsonOption, fail, print_json
from kvindexd.cli.progress import progress
from kvindexd.ingest.sockets import TransportError, check_endpoint
from kvindexd.registration import Registration
from kvindexd.rpc.codec import registration_of
from kvindexd.telemetry import configure_logging
from kvindexd.v1 import index_pb2 as pb

_SOURCE = "w0"
_MIB = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("capture")(capture)


def capture(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    worker: Annotated[str, typer.Option(help="A registered worker to capture.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="The engine's events endpoint, without asking a server.")
    ] = "",
    replay_endpoint: Annotated[
        str, typer.Option(help="The engine's replay endpoint; default: as registered.")
    ] = "",
    topic: Annotated[str, typer.Option(help="Topic prefix, with --endpoint.")] = "",
    model: Annotated[str, typer.Option(help="Model id for the header, with --endpoint.")] = "",
    engine: Annotated[str, typer.Option(help="Engine for the header, with --endpoint.")] = "",
    dp_rank: Annotated[int, typer.Option("--dp-rank", "--rank", min=0, help="Rank.")] = 0,
    namespace: NamespaceOption = "",
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so long; 0 = never.")] = 0.0,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many frames; 0 = never.")] = 0,
    max_bytes: Annotated[
        int, typer.Option(min=0, help="Stop when the file has this size; 0 = never.")
    ] = 1024 * _MIB,
    mask_tokens: Annotated[
        bool, typer.Option("--mask-tokens", help="Replace token ids, names and hashes.")
    ] = False,
    include_replay: Annotated[
        bool, typer.Option("--include-replay", help="Also read the engine's replay buffer.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    note: Annotated[str, typer.Option(help="A remark for the header.")] = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Record an engine's event stream to a file, frame by frame, until a bound or Ctrl-C.

    Exit status 1 if not one frame came, or the file could not be written.
    """
    if bool(worker) == bool(endpoint):
        raise typer.BadParameter("give one of the two: --worker, or --endpoint")
    if endpoint:
        what = Registration(
            worker_id=_SOURCE,
            dp_rank=dp_rank,
            model=model,
            engine=engine,
            kv_events_endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=topic,
        )
    else:
        what = _registered(server, worker, dp_rank, namespace)
        if replay_endpoint:
            what = msgspec.structs.replace(what, replay_endpoint=replay_endpoint)
    target = _target(what, include_replay)
    header = Header(
        kvindexd=__version__,
        started=time.time(),
        sources={_SOURCE: what},
        masked=mask_tokens,
        includes_replay=include_replay,
        note=note,
    )
    # Link changes are in the file, and in the progress line.
    configure_logging("console", "error")
    bounds = Bounds(seconds=seconds, count=count, max_bytes=max_bytes)
    done = _record(target, header, bounds, output, force)
    _tell(done, output, as_json)


def _registered(server: str, worker: str, dp_rank: int, namespace: str) -> Registration:
    with connect(server) as client:
        ask = pb.GetWorkerRequest(worker_id=worker, dp_rank=dp_rank, namespace=namespace)
        found = client.admin.GetWorker(ask, timeout=CALL_TIMEOUT).worker
    if found.bind_events:
        fail(
            f"worker {worker}#{dp_rank} has bind_events: its engine connects to kvindexd's own "
            "socket, so that nobody else can listen; let it connect to a forwarder, or bind itself"
        )
    return registration_of(found)


def _target(what: Registration, include_replay: bool) -> Target:
    if include_replay and not what.replay_endpoint:
        fail(
            "--include-replay: no replay endpoint is known; give --replay-endpoint, and start the "
            "engine with one"
        )
    try:
        check_endpoint(what.kv_events_endpoint)
        if include_replay:
            check_endpoint(what.replay_endpoint)
    except TransportError as e:
        fail(str(e))
    replay_endpoint = what.replay_endpoint if include_replay else ""
    return Target(_SOURCE, what.kv_events_endpoint, what.topic, replay_endpoint)


class _Done(NamedTuple):
    reason: str
    status: Status
    connections: int
    payload_bytes: int


def _record(target: Target, header: Header, bounds: Bounds, output: Path, force: bool) -> _Done:
    try:
        writer = CaptureWriter(output, header, overwrite=force)
        recorder = Recorder(target, writer, bounds, mask=Mask() if header.masked else None)
        reason = "failed"
        try:
            reason = asyncio.run(_run(recorder))
        finally:
            writer.close(reason)
        return _Done(reason, recorder.status, recorder.connections, writer.payload_bytes)
    except (CaptureError, TransportError) as e:
        fail(str(e))
    except OSError as e:
        fail(f"cannot write {output}: {e.strerror}")


async def _run(recorder: Recorder) -> str:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, recorder.stop, "interrupted")
    with progress() as show:
        return await recorder.run(lambda s: show(_said(s)))


def _said(s: Status) -> str:
    replayed = f" (and {s.replayed:,} replayed)" if s.replayed else ""
    return f"{s.live:,} frames{replayed}, {s.size / _MIB:.1f} MiB, {s.seconds:.0f} s; {s.link}"


def _tell(done: _Done, output: Path, as_json: bool) -> None:
    status = done.status
    if as_json:
        print_json(
            {
                "file": str(output),
                "reason": done.reason,
                "frames": status.live,
                "replayed": status.replayed,
                "messages": status.messages,
                "payload_bytes": done.payload_bytes,
                "size": status.size,
                "seconds": round(status.seconds, 3),
                "connections": done.connections,
            }
        )
    else:
        typer.echo(f"{output}: {_said(status)} ({done.reason})")
    if not status.live + status.replayed:
        fail(f"not one frame came; {status.link}")
