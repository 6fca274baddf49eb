"""Sections of who may connect, call and register."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvindexd.config.base import Section

Listener = Literal["server", "admin", "ext_proc", "metrics"]
RoleName = Literal["admin", "score", "read"]
ALL_LISTENERS: tuple[Listener, ...] = ("server", "admin", "ext_proc", "metrics")


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of the listeners. Changed files are used for new connections, without a restart."""

    cert_file: Annotated[
        str, Meta(description='Certificate and its chain, PEM; "" = no TLS anywhere')
    ] = ""
    key_file: Annotated[str, Meta(description="Private key of cert_file, PEM")] = ""
    client_ca_file: Annotated[
        str, Meta(description='Authorities of client certificates, PEM; "" = none are asked for')
    ] = ""
    listeners: Annotated[
        list[Listener], Meta(description="Listeners that speak TLS once cert_file is set")
    ] = msgspec.field(default_factory=lambda: list(ALL_LISTENERS))
    client_certs: Annotated[
        list[Listener],
        Meta(
            description="Listeners that require a client certificate once client_ca_file is set; "
            "health probes need one there too"
        ),
    ] = msgspec.field(default_factory=lambda: ["server", "admin", "ext_proc"])


class AuthConfig(Section, frozen=True, kw_only=True):
    """Who may call what. Without tokens_file, tokens and clients, whoever connects may."""

    tokens_file: Annotated[
        str, Meta(description="File of `role token [name]` lines, read again when it changes")
    ] = ""
    tokens: Annotated[
        dict[str, list[str]], Meta(description="Role (admin, score, read) -> bearer tokens")
    ] = msgspec.field(default_factory=dict)
    clients: Annotated[
        dict[str, RoleName],
        Meta(
            description="Name in a client certificate -> role, such as "
            '"dns:*.gateways.example" = "score"; kinds: dns, uri, ip, email, cn'
        ),
    ] = msgspec.field(default_factory=dict)
    scoring: Annotated[
        Literal["closed", "open"],
        Meta(description="Whether KVIndex and ext_proc need credentials too, once there are any"),
    ] = "closed"
    metrics: Annotated[
        Literal["closed", "open"],
        Meta(
            description="Whether /metrics needs them too; other pages always do, health pages never"
        ),
    ] = "open"
    insecure: Annotated[
        bool, Meta(description="Start although strangers could reach administration")
    ] = False


class RegistrationConfig(Section, frozen=True, kw_only=True):
    """Where registered workers may be."""

    allow_networks: Annotated[
        list[str],
        Meta(description="Networks that endpoints and addresses must lie in; empty = anywhere"),
    ] = msgspec.field(default_factory=list)
    allow_ipc: Annotated[
        bool, Meta(description="With allow_networks: accept ipc:// endpoints too")
    ] = False
    resolve_timeout: Annotated[
        float, Meta(gt=0, description="Longest wait for a name's addresses, with allow_networks")
    ] = 5.0
