"""What a worker rank registers of itself: one type for configuration, store, ingest and API."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvindexd.layout import Layout
from kvindexd.model import WorkerKey
from kvindexd.scoring.geometry import WorkerOptions

RoleName = Literal["MIXED", "PREFILL", "DECODE"]
_ENDPOINT = re.compile(
    r"^(tcp://(\[[0-9A-Fa-f:.%*]+\]|[^:/\s\[\]]+):[0-9*]+|ipc://.+|inproc://.+)$"
)


class InvalidRegistration(ValueError):
    """A registration that cannot be used; the message names the field and what is expected."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The input fields of message Worker (05-api.md), with its names, units and defaults.

    `instance`: names the process behind the address, where something knows it. `source`: what
    registered it ("config", a discovery source's name), "" = an explicit call; see discovery/.
    """

    worker_id: str
    dp_rank: int = 0
    dp_size: int = 0
    model: str = ""
    namespace: str = ""
    address: str = ""
    kv_events_endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    block_size: int = 0
    engine: str = ""
    role: RoleName = "MIXED"
    kv_layout: str = ""
    tp_size: int = 0
    num_kv_heads: int = 0
    labels: dict[str, str] = {}
    eagle: bool = False
    bind_events: bool = False
    aliases: tuple[str, ...] = ()
    chunk_size: int = 0
    reports_reuse: bool = False
    hidden_groups: bool = False
    instance: str = ""
    source: str = ""

    @property
    def key(self) -> WorkerKey:
        """The rank that this registers."""
        return WorkerKey(self.namespace, self.worker_id, self.dp_rank)

    @property
    def options(self) -> WorkerOptions:
        """What scoring must know that no wire carries."""
        return WorkerOptions(self.eagle, self.chunk_size, self.hidden_groups)

    def check(self) -> None:
        """Raise InvalidRegistration for a field that cannot be right."""
        if not self.worker_id:
            raise InvalidRegistration("worker_id: empty; every worker needs a unique name")
        if not self.kv_events_endpoint:
            raise InvalidRegistration(
                "kv_events_endpoint: empty; expected a ZMQ endpoint such as tcp://10.0.0.5:5557"
            )
        for name in ("kv_events_endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value and not _ENDPOINT.match(value):
                raise InvalidRegistration(
                    f"{name}: {value!r} is no ZMQ endpoint; expected tcp://host:port, "
                    "tcp://[v6]:port, ipc://path or inproc://name"
                )
            if value.startswith("tcp://*:") and not (self.bind_events and name[0] == "k"):
                raise InvalidRegistration(
                    f"{name}: {value!r} is what the engine binds; name the host to connect to, "
                    "such as tcp://10.0.0.5:5557 (or set bind_events for us to bind it)"
                )
        if self.dp_size and self.dp_rank >= self.dp_size:
            raise InvalidRegistration(
                f"dp_rank: {self.dp_rank} is outside dp_size {self.dp_size} (ranks count from 0)"
            )
        if self.kv_layout:
            try:
                Layout.parse(self.kv_layout)
            except ValueError as e:
                raise InvalidRegistration(f"kv_layout: {e}") from None

    def encode(self) -> bytes:
        """As the store keeps it."""
        return msgspec.msgpack.encode(self)

    def replaces_cache(self, old: Registration) -> bool:
        """Whether this names another process than `old`: a changed address, endpoint or instance
        is a new incarnation, and what the old one held says nothing about it."""
        return (self.address, self.kv_events_endpoint, self.model, self.instance) != (
            old.address,
            old.kv_events_endpoint,
            old.model,
            old.instance,
        )


_decoder = msgspec.msgpack.Decoder(Registration)


def decode(record: bytes) -> Registration:
    """The inverse of `Registration.encode`. Raises msgspec.MsgspecError."""
    return _decoder.decode(record)
