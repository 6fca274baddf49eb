"""`kvindexd block` and `kvindexd chain`: who holds a block, and the way from it to the root."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvindexd.cli.client import CALL_TIMEOUT, DEFAULT_SERVER, ServerOption
from kvindexd.cli.options import parse_hash
from kvindexd.cli.output import ConfigOption, JsonOption, console, hex64, plain, print_json, table
from kvindexd.cli.reading import RedisOption, Where
from kvindexd.v1 import index_pb2 as pb

HashArgument = Annotated[
    str, typer.Argument(metavar="HASH", help="Chain key of the block's end, in hex.")
]
ModelOption = Annotated[str, typer.Option(help="Model id; default: the only live one.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("block")(block)
    app.command("chain")(chain)


def block(
    hash: HashArgument,
    model: ModelOption = "",
    redis: RedisOption = None,
    config: ConfigOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Say who holds a block."""
    from kvindexd.cli import offline  # most answers need no store

    request = pb.GetBlockRequest(hash=parse_hash(hash), model=model)
    answer: pb.GetBlockResponse = offline.ask(
        Where(server, redis, config),
        lambda client: client.admin.GetBlock(request, timeout=CALL_TIMEOUT),
        lambda store, advance: offline.get_block(store, request.hash, model, advance),
    )
    if as_json:
        print_json(answer)
        return
    out = console()
    names = f"block {hex64(answer.hash)}, parent {hex64(answer.parent)}"
    out.print(f"{names}, ends at {answer.depth:,} tokens")
    out.print(_holders(answer.holders) if answer.holders else "held by nobody")


def chain(
    hash: HashArgument,
    model: ModelOption = "",
    redis: RedisOption = None,
    config: ConfigOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Walk from a block to the root."""
    from kvindexd.cli import offline  # most answers need no store

    request = pb.WalkChainRequest(hash=parse_hash(hash), model=model)
    blocks: list[pb.GetBlockResponse] = offline.ask(
        Where(server, redis, config),
        lambda client: list(client.admin.WalkChain(request, timeout=CALL_TIMEOUT)),
        lambda store, advance: offline.walk_chain(store, request.hash, model, advance),
    )
    if as_json:
        print_json({"blocks": [plain(b) for b in blocks]})
        return
    shown = table("TOKENS, HASH, PARENT, HOLDERS", right="TOKENS")
    for b in blocks:
        names = ", ".join(f"{h.worker_id}#{h.dp_rank}({'+'.join(h.tiers)})" for h in b.holders)
        shown.add_row(f"{b.depth:,}", hex64(b.hash), hex64(b.parent), names or "-")
    console().print(shown)


def _holders(holders: Any) -> Any:
    shown = table("WORKER, RANK, TIERS, GROUPS", right="RANK")
    for h in holders:
        groups = ", ".join(str(g) for g in h.groups)
        shown.add_row(h.worker_id, str(h.dp_rank), ", ".join(h.tiers), groups)
    return shown
