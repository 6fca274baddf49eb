"""How commands prove who they are: --ca, --cert, --key and --token, on every one with --server.

The options are added to the commands' signatures in one place, so that no command can lack them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import grpc
import typer

from kvindexd.cli.output import fail

SYSTEM = "system"
"""Value of --ca that stands for the authorities that the system trusts."""

_OPTIONS: dict[str, Any] = {
    "ca": Annotated[
        str,
        typer.Option(
            "--ca",
            envvar="KVINDEXD_CA",
            help=f"Connect with TLS; file of the server's authority, or `{SYSTEM}`.",
        ),
    ],
    "cert": Annotated[
        str, typer.Option("--cert", envvar="KVINDEXD_CERT", help="Our certificate, PEM.")
    ],
    "key": Annotated[str, typer.Option("--key", envvar="KVINDEXD_KEY", help="Its private key.")],
    "token": Annotated[
        str,
        typer.Option(
            "--token",
            envvar="KVINDEXD_TOKEN",
            help="Bearer token; better by the variable: others see a process's options.",
        ),
    ],
}


class Credentials(NamedTuple):
    """What to show a server; "" = nothing. With `ca` or `cert` the connection is TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""


_given = Credentials()


def install(app: typer.Typer) -> None:
    """Give every command of `app`, and of the groups in it, that takes `server` the options."""
    for command in app.registered_commands:
        if command.callback and "server" in inspect.signature(command.callback).parameters:
            command.callback = _with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            install(group.typer_instance)


def _with_options(command: Any) -> Any:
    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        global _given
        _given = Credentials(**{name: given.pop(name) for name in _OPTIONS})
        return command(**given)

    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    hints = get_type_hints(command, include_extras=True)
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(p.name, p.annotation))
        for p in signature.parameters.values()
    ]
    wrapped.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]  # for typer
    wrapped.__annotations__ = hints | _OPTIONS
    return wrapped


def open_channel(
    server: str, options: Sequence[tuple[str, Any]], credentials: Credentials | None = None
) -> grpc.Channel:
    """A channel to `server` with the credentials of the command line, or these."""
    c = credentials or _given
    if c.ca or c.cert:
        channel = grpc.secure_channel(server, _channel_credentials(c), options=list(options))
    elif c.key:
        fail("--key is given without --cert: both are needed to show a certificate")
    else:
        channel = grpc.insecure_channel(server, options=list(options))
    return grpc.intercept_channel(channel, _WithToken(c.token)) if c.token else channel


def _channel_credentials(c: Credentials) -> grpc.ChannelCredentials:
    if bool(c.cert) != bool(c.key):
        fail("--cert and --key belong together: give both, or neither")
    return grpc.ssl_channel_credentials(
        root_certificates=_read(c.ca, "--ca") if c.ca not in ("", SYSTEM) else None,
        private_key=_read(c.key, "--key") if c.key else None,
        certificate_chain=_read(c.cert, "--cert") if c.cert else None,
    )


def _read(path: str, option: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        fail(f"{option}: cannot read {path}: {e.strerror}")


class _Details(NamedTuple):
    """A call's details, as interceptors hand them on."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _WithToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to every call. gRPC's own call credentials refuse connections without TLS,
    which on loopback are fine."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _call(self, go_on: Any, details: Any, request: Any) -> Any:
        return go_on(
            _Details(
                details.method,
                details.timeout,
                [*(details.metadata or ()), self._header],
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """One request, one answer."""
        return self._call(continuation, client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        """One request, many answers."""
        return self._call(continuation, client_call_details, request)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Many of both."""
        return self._call(continuation, client_call_details, request_iterator)
