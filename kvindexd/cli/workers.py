"""`kvindexd workers`: the registry."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from google.protobuf.message import Message

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.options import LabelOption, RoleName, parse_labels
from kvindexd.cli.output import (
    ConfigOption,
    JsonOption,
    ago,
    console,
    plain,
    print_json,
    state_text,
    table,
    worker_name,
)
from kvindexd.cli.reading import RedisOption, Where
from kvindexd.cli.worker_page import worker_tables
from kvindexd.model import WorkerKey
from kvindexd.v1 import index_pb2 as pb

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Worker id.")]
RankOption = Annotated[
    int | None, typer.Option("--dp-rank", "--rank", min=0, help="One rank; default: all ranks.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(no_args_is_help=True, help="List, register and tend workers.")
    group.command("list")(list_)
    group.command("show")(show)
    group.command("add")(add)
    group.command("remove")(remove)
    for name, (rpc, make, what) in _TENDING.items():
        group.command(name, help=what)(_tending(rpc, make))
    app.add_typer(group, name="workers")


def list_(
    model: Annotated[str, typer.Option(help="Only this model's.")] = "",
    namespace: Annotated[str, typer.Option(help="Only this namespace; default: all.")] = "",
    stale: Annotated[bool, typer.Option(help="Show STALE workers too.")] = True,
    redis: RedisOption = None,
    config: ConfigOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """List worker ranks with their state."""
    from kvindexd.cli import offline  # most answers need no store

    request = pb.ListWorkersRequest(model=model, namespace=namespace, include_stale=stale)
    answer: pb.ListWorkersResponse = offline.ask(
        Where(server, redis, config),
        lambda client: client.admin.ListWorkers(request, timeout=CALL_TIMEOUT),
        lambda store, _: offline.list_workers(store, request),
    )
    if as_json:
        print_json(answer)
    elif answer.workers:
        console().print(_overview(answer.workers))
    else:
        typer.echo("no workers; register one with `kvindexd workers add`", err=True)


def show(
    worker: WorkerArgument,
    dp_rank: Annotated[int, typer.Option("--dp-rank", "--rank", min=0, help="Rank.")] = 0,
    namespace: NamespaceOption = "",
    redis: RedisOption = None,
    config: ConfigOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show all that is known of one worker rank."""
    from kvindexd.cli import offline  # most answers need no store

    request = pb.GetWorkerRequest(worker_id=worker, dp_rank=dp_rank, namespace=namespace)
    key = WorkerKey(namespace, worker, dp_rank)
    answer: pb.GetWorkerResponse = offline.ask(
        Where(server, redis, config),
        lambda client: client.admin.GetWorker(request, timeout=CALL_TIMEOUT),
        lambda store, _: offline.get_worker(store, key),
    )
    _print_worker(answer.worker, as_json)


def add(
    worker: WorkerArgument,
    model: Annotated[str, typer.Option(help="Model id.")],
    address: Annotated[str, typer.Option(help="host:port that serves requests.")],
    kv_events_endpoint: Annotated[str, typer.Option(help="ZMQ endpoint of this rank's events.")],
    replay_endpoint: Annotated[str, typer.Option(help="ZMQ endpoint of the replay socket.")] = "",
    topic: Annotated[str, typer.Option(help="Subscription prefix; default: all.")] = "",
    dp_rank: Annotated[int, typer.Option("--dp-rank", "--rank", min=0, help="Rank.")] = 0,
    dp_size: Annotated[int, typer.Option(min=0, help="Number of ranks.")] = 0,
    namespace: NamespaceOption = "",
    block_size: Annotated[int, typer.Option(min=0, help="Tokens per block; 0 = learn.")] = 0,
    engine: Annotated[str, typer.Option(help="vllm, sglang, ...")] = "",
    role: Annotated[RoleName, typer.Option(help="What it serves.")] = RoleName.MIXED,
    kv_layout: Annotated[str, typer.Option(help="LBHNC, ...")] = "",
    tp_size: Annotated[int, typer.Option(min=0, help="Tensor-parallel size.")] = 0,
    num_kv_heads: Annotated[int, typer.Option(min=0, help="KV heads of the model.")] = 0,
    label: LabelOption = None,
    alias: Annotated[list[str] | None, typer.Option(help="Other name; repeatable.")] = None,
    eagle: Annotated[
        bool, typer.Option("--eagle", help="The engine drops the last matched block.")
    ] = False,
    bind_events: Annotated[
        bool, typer.Option("--bind-events", help="Bind the endpoint; the engine connects.")
    ] = False,
    chunk_size: Annotated[int, typer.Option(min=0, help="Tokens per attention chunk.")] = 0,
    reports_reuse: Annotated[
        bool, typer.Option("--reports-reuse", help="Reused blocks are announced again.")
    ] = False,
    hidden_groups: Annotated[
        bool, typer.Option("--hidden-groups", help="Some groups publish nothing.")
    ] = False,
    instance: Annotated[
        str, typer.Option(help="Names the process at the address; another one = a new cache.")
    ] = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Register a worker rank, or update it."""
    message = pb.Worker(
        worker_id=worker,
        model=model,
        address=address,
        kv_events_endpoint=kv_events_endpoint,
        replay_endpoint=replay_endpoint,
        topic=topic,
        dp_rank=dp_rank,
        dp_size=dp_size,
        namespace=namespace,
        block_size=block_size,
        engine=engine,
        role=role.name,
        kv_layout=kv_layout,
        tp_size=tp_size,
        num_kv_heads=num_kv_heads,
        labels=parse_labels(label),
        aliases=alias or [],
        eagle=eagle,
        bind_events=bind_events,
        chunk_size=chunk_size,
        reports_reuse=reports_reuse,
        hidden_groups=hidden_groups,
        instance=instance,
    )
    with connect(server) as client:
        answer = client.admin.RegisterWorker(
            pb.RegisterWorkerRequest(worker=message), timeout=CALL_TIMEOUT
        )
    _print_worker(answer.worker, as_json)


def remove(
    worker: WorkerArgument,
    dp_rank: RankOption = None,
    namespace: NamespaceOption = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Deregister a worker and forget all that the index holds of it."""
    request = pb.DeregisterWorkerRequest(worker_id=worker, dp_rank=dp_rank, namespace=namespace)
    with connect(server) as client:
        client.admin.DeregisterWorker(request, timeout=CALL_TIMEOUT)
    if as_json:
        print_json({})
    else:
        typer.echo(f"removed {worker}" + ("" if dp_rank is None else f" rank {dp_rank}"))


# Command -> (its rpc, its request, what it does); all take a worker and none or one of its ranks.
_TENDING: dict[str, tuple[str, type[Message], str]] = {
    "drain": ("DrainWorker", pb.DrainWorkerRequest, "Ask that a worker get no new requests."),
    "purge": (
        "PurgeWorker",
        pb.PurgeWorkerRequest,
        "Forget all that the index holds of a worker; it stays registered.",
    ),
    "resync": (
        "ResyncWorker",
        pb.ResyncWorkerRequest,
        "Forget, and ask the engine for a replay of its events.",
    ),
}


def _tending(rpc: str, make: type[Message]):  # type: ignore[no-untyped-def]  # typer reads the inner signature
    def command(
        worker: WorkerArgument,
        dp_rank: RankOption = None,
        namespace: NamespaceOption = "",
        server: ServerOption = DEFAULT_SERVER,
        as_json: JsonOption = False,
    ) -> None:
        request = make(worker_id=worker, dp_rank=dp_rank, namespace=namespace)
        with connect(server) as client:
            answer = getattr(client.admin, rpc)(request, timeout=CALL_TIMEOUT)
        _print_worker(answer.worker, as_json)

    return command


def _overview(workers: Any) -> Any:
    shown = table(
        "WORKER, RANK, STATE, MODEL, ADDRESS, BLOCKS, EPOCH, SEQ, EVENT, GAPS, DETAIL",
        right="RANK, BLOCKS, EPOCH, SEQ, EVENT, GAPS",
    )
    for w in workers:
        shown.add_row(
            worker_name(w.namespace, w.worker_id),
            str(w.dp_rank),
            state_text(pb.WorkerState.Name(w.state)),
            w.model,
            w.address,
            f"{sum(w.blocks.values()):,}",
            str(w.epoch),
            str(w.last_seq),
            f"{ago(w.last_event_ms_ago)} ago" if w.last_seq >= 0 else "-",
            str(w.counters.get("gaps", 0)),
            w.detail,
        )
    return shown


def _print_worker(worker: pb.Worker, as_json: bool) -> None:
    if as_json:
        print_json({"worker": plain(worker)})
        return
    out = console()
    for i, part in enumerate(worker_tables(worker)):
        if i:
            out.print()
        out.print(part)
