"""What every command's --help ends with: examples to copy."""

from __future__ import annotations

from collections.abc import Iterator

import typer
from typer.models import CommandInfo

# By the command's name behind `kvindexd`; a command that has an epilog of its own needs none here.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "serve": ("kvindexd serve --config kvindexd.toml",),
    "sidecar": ("kvindexd sidecar --redis-url redis://redis.example:6379/0",),
    "scorer": ("kvindexd scorer --redis-url redis://redis.example:6379/0 --listen 0.0.0.0:50051",),
    "workers list": (
        "kvindexd workers list --model m",
        "kvindexd workers list --redis redis://redis.example:6379/0",
    ),
    "workers show": ("kvindexd workers show w0 --rank 1",),
    "workers add": (
        "kvindexd workers add w0 --model m --address 10.0.0.5:8000 --kv-events-endpoint "
        "tcp://10.0.0.5:5557 --replay-endpoint tcp://10.0.0.5:5558",
    ),
    "workers remove": ("kvindexd workers remove w0",),
    "workers drain": ("kvindexd workers drain w0 --rank 1",),
    "workers purge": ("kvindexd workers purge w0",),
    "workers resync": ("kvindexd workers resync w0",),
    "score": (
        "kvindexd score --model m @prompt.json",
        "echo '1 2 3' | kvindexd score --model m @- --json",
    ),
    "explain": (
        "kvindexd explain --model m @prompt.json",
        "kvindexd explain --model m @prompt.json --against engine-prompt.json",
    ),
    "block": ("kvindexd block 0xd2e217905d2bda1d --model m",),
    "chain": ("kvindexd chain 0xd2e217905d2bda1d --json",),
    "tail": (
        "kvindexd tail w0",
        "kvindexd tail w0 --rank 1 --json --count 100 | jq 'select(.kept | not)'",
    ),
    "top": (
        "kvindexd top --sort stores",
        "kvindexd top --worker w0",
        "kvindexd top --json --interval 10",
    ),
    "audit": ("kvindexd audit w0", "kvindexd audit w0 --replay"),
    "doctor": ("kvindexd doctor --config kvindexd.toml", "kvindexd doctor --only redis-* --json"),
    "capture": (
        "kvindexd capture --worker w0 --output w0.capture --seconds 60",
        "kvindexd capture --endpoint tcp://10.0.0.5:5557 -o w0.capture --mask-tokens",
    ),
    "replay": ("kvindexd replay w0.capture --bind tcp://127.0.0.1:5557 --speed 2",),
    "conformance": ("kvindexd conformance w0.capture --verbose",),
    "layout": ("kvindexd layout",),
    "layout resolve": ("kvindexd layout resolve LBHNC LBNHC --requested LBNHC",),
    "layout check": (
        "kvindexd layout check LBHNC:tp=2,heads=8,block=16 LBHNC:tp=4,heads=8,block=16",
    ),
    "bench": ("kvindexd bench --quick",),
    "config show": ("kvindexd config show --config kvindexd.toml",),
    "config schema": ("kvindexd config schema > kvindexd.schema.json",),
}


def install(app: typer.Typer) -> None:
    """Give every command of `app`, and of the groups in it, its examples."""
    for name, info in commands(app):
        if not info.epilog and name in EXAMPLES:
            info.epilog = epilog(EXAMPLES[name])
    for group in app.registered_groups:
        if group.name in EXAMPLES and group.typer_instance is not None:
            group.epilog = epilog(EXAMPLES[group.name])


def commands(app: typer.Typer, before: str = "") -> Iterator[tuple[str, CommandInfo]]:
    """Every command with its name behind `kvindexd`."""
    for info in app.registered_commands:
        name = info.name or getattr(info.callback, "__name__", "").replace("_", "-")
        yield before + name, info
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from commands(group.typer_instance, f"{before}{group.name} ")


def epilog(examples: tuple[str, ...]) -> str:
    """Examples as --help shows them, each a paragraph of its own."""
    return "\n\n".join(["Examples:" if len(examples) > 1 else "Example:", *examples])
