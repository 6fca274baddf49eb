"""The options of every command that asks about a prompt, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from kvindexd.cli.client import NamespaceOption
from kvindexd.cli.options import (
    LabelOption,
    PromptArgument,
    RoleName,
    parse_labels,
    parse_prompt,
)
from kvindexd.v1 import index_pb2 as pb


def _request(
    prompt: PromptArgument,
    model: Annotated[str, typer.Option(help="Model id; default: the only live one.")] = "",
    namespace: NamespaceOption = "",
    lora_name: Annotated[str, typer.Option(help="Adapter name.")] = "",
    cache_salt: Annotated[str, typer.Option(help="The engine's cache salt.")] = "",
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", help="Worker id or address to consider; repeatable."),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Best N only; 0 = all.")] = 0,
    role: Annotated[RoleName | None, typer.Option(help="Only workers of this role.")] = None,
    label: LabelOption = None,
    include_stale: Annotated[
        bool, typer.Option("--include-stale", help="Include STALE workers.")
    ] = False,
    device_only: Annotated[
        bool, typer.Option("--device-only", help="Count the device tier alone.")
    ] = False,
) -> pb.ScoreWorkersRequest:
    asked = parse_prompt(prompt)
    asked.model, asked.namespace = model, namespace
    asked.lora_name, asked.cache_salt = lora_name, cache_salt
    options = pb.ScoreOptions(
        top_k=top_k,
        role=None if role is None else role.name,
        labels=parse_labels(label),
        include_stale=include_stale,
        device_only=device_only,
    )
    return pb.ScoreWorkersRequest(prompt=asked, candidates=candidate or [], options=options)


def about_a_prompt(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose first parameter is a ScoreWorkersRequest, the options that make one in
    its place."""
    asking = inspect.signature(_request, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**given: object) -> None:
        request = _request(**{name: given.pop(name) for name in asking})  # type: ignore[arg-type]  # as declared
        command(request, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*asking.values(), *own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer to read
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
