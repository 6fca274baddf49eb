"""`kvindexd layout`: the layouts, which one a request resolves to, and whether two workers fit."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    Client,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.output import JsonOption, console, fail, print_json, table
from kvindexd.layout import Layout, Side, head_major, resolve, transfer
from kvindexd.v1 import index_pb2 as pb

_DIMENSIONS = ("layers", "blocks", "KV heads", "tokens", "content")
_SPEC = re.compile(
    r"(?P<layout>[A-Za-z]{5})(:(?P<rest>(tp|heads|block)=\d+(,(tp|heads|block)=\d+)*))?"
)

CandidatesArgument = Annotated[
    list[str],
    typer.Argument(metavar="LAYOUT...", help="What the backends support, best first."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(
        invoke_without_command=True,
        help="KV layouts: list them, resolve a request, check whether two workers can transfer.",
    )
    group.callback()(layouts)
    group.command("resolve")(resolve_request)
    group.command("check")(check)
    app.add_typer(group, name="layout")


def layouts(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the layouts."""
    if context.invoked_subcommand is not None:
        return
    rows: list[dict[str, Any]] = [
        {
            "layout": layout.name,
            "physical_order": [_DIMENSIONS[d] for d in layout.value],
            "head_major": head_major(layout.value),
            "page": _page(layout),
        }
        for layout in Layout
    ]
    if as_json:
        print_json({"layouts": rows})
        return
    shown = table("LAYOUT, PHYSICAL ORDER, HEAD-MAJOR, PAGE IS REGISTERED AS")
    for row in rows:
        order = ", ".join(map(str, row["physical_order"]))
        shown.add_row(row["layout"], order, "yes" if row["head_major"] else "no", row["page"])
    console().print(shown)


def resolve_request(
    candidates: CandidatesArgument,
    requested: Annotated[
        str, typer.Option("--requested", help="What the connector asks for; default: nothing.")
    ] = "",
    explicit: Annotated[
        str, typer.Option("--explicit", help="The operator's own setting; must be supported.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Say which layout an engine will use."""
    supported = [_parse(name, "LAYOUT") for name in candidates]
    wanted = _parse(requested, "--requested") if requested else None
    own = _parse(explicit, "--explicit") if explicit else None
    try:
        found = resolve(supported, requested=wanted, explicit=own)
    except ValueError as e:
        fail(str(e))
    why = _why(found, supported, wanted, own)
    if as_json:
        print_json({"layout": found.name, "head_major": head_major(found.value), "reason": why})
        return
    console().print(f"{found.name}: {why}")


def check(
    prefill: Annotated[
        str,
        typer.Argument(
            help="Prefill side: a registered worker (id, or id#rank), or a description such as"
            " BLHNC:tp=1,heads=8,block=16."
        ),
    ],
    decode: Annotated[str, typer.Argument(help="Decode side, likewise.")],
    namespace: NamespaceOption = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Say whether the KV cache of one worker can be moved to another; status 1 if not."""
    sides = [_described(text) for text in (prefill, decode)]
    if None in sides:
        with connect(server) as client:
            sides = [
                side or _registered(client, text, namespace)
                for side, text in zip(sides, (prefill, decode), strict=True)
            ]
    first, second = sides
    assert first is not None and second is not None  # noqa: S101,PT018 - for the type checker
    verdict = transfer(first, second)
    if as_json:
        print_json({"transferable": verdict.transferable, "reason": verdict.reason})
    else:
        console().print(f"{'yes' if verdict.transferable else 'no'}: {verdict.reason}")
    if not verdict.transferable:
        raise typer.Exit(1)


def _page(layout: Layout) -> str:
    return "slices per KV head" if head_major(layout.value) else "one row per page"


def _parse(name: str, where: str) -> Layout:
    try:
        return Layout.parse(name)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=where) from None


def _why(found: Layout, supported: list[Layout], wanted: Layout | None, own: Layout | None) -> str:
    if own is not None:
        return "set explicitly"
    if wanted is None:
        return "nothing is requested: the first that is supported"
    if found is wanted:
        return "as requested"
    if head_major(found.value) == head_major(wanted.value):
        return f"{wanted.name} is not supported; this is the first with the same head/token order"
    return (
        f"neither {wanted.name} nor another layout with its head/token order is supported: the "
        "first that is"
    )


def _described(text: str) -> Side | None:
    """A side given as LAYOUT:key=n,...; None for anything that reads as a worker's name."""
    found = _SPEC.fullmatch(text.strip())
    if found is None or found["layout"].upper() not in Layout.__members__:
        return None
    given = dict(pair.split("=") for pair in (found["rest"] or "").split(",") if pair)
    tp, heads, block = (int(given.get(k, 0)) for k in ("tp", "heads", "block"))
    return Side(Layout.parse(found["layout"]), tp, heads, block)


def _registered(client: Client, text: str, namespace: str) -> Side:
    name, _, rank = text.rpartition("#")
    if not name or not rank.isdigit():
        name, rank = text, "0"
    request = pb.GetWorkerRequest(worker_id=name, dp_rank=int(rank), namespace=namespace)
    worker = client.admin.GetWorker(request, timeout=CALL_TIMEOUT).worker
    main = [g.block_size for g in worker.groups if g.treated_as == "main"]
    layout = Layout.parse(worker.kv_layout) if worker.kv_layout else None
    size = main[0] if main else worker.block_size
    return Side(layout, worker.tp_size, worker.num_kv_heads, size)
