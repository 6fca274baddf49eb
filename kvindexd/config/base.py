"""What the sections of the settings share."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["serve", "sidecar", "scorer"]
"""What a process is: everything, ingest alone, or answers alone."""


def parse_listen(text: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port` (loopback). Raises ValueError, saying why."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ValueError(f"{text!r}: expected host:port (an IPv6 host in brackets)")
    return host.strip("[]") or "127.0.0.1", int(port)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, by keyword, and strict about names."""


class ConfigError(ValueError):
    """A setting that cannot be used; the text says which, what was expected and what to do."""
