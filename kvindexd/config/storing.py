"""Sections of the index and the store that holds it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvindexd.config.base import ConfigError, Section


def default_data_dir() -> str:
    """The user's data folder for kvindexd."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return str(Path(base) / "kvindexd")


class IndexConfig(Section, frozen=True, kw_only=True):
    """The index."""

    hybrid: Annotated[
        Literal["exact", "attention-only"],
        Meta(description="Apply every KV-cache group's rule, or the main group's alone"),
    ] = "exact"
    data_dir: Annotated[str, Meta(description="Folder of the embedded Valkey's files")] = (
        msgspec.field(default_factory=default_data_dir)
    )
    unbound_ttl: Annotated[
        float, Meta(gt=0, description="Life of blocks that no engine hash is bound to")
    ] = 60.0


class RedisConfig(Section, frozen=True, kw_only=True):
    """The store."""

    url: Annotated[str, Meta(description='"" = embedded Valkey in index.data_dir')] = ""
    username: Annotated[str, Meta(description="Used when the URL names none")] = ""
    password_file: Annotated[
        str, Meta(description='File that holds the password; "" = the one in the URL, if any')
    ] = ""
    timeout: Annotated[float, Meta(gt=0, description="Limit of one call, connecting included")] = (
        2.0
    )
    pool_size: Annotated[int, Meta(ge=1, description="Connections per process")] = 16
    shards: Annotated[
        int, Meta(ge=1, le=16384, description="Hash slots that workers are spread over")
    ] = 1

    def password(self) -> str:
        """The content of `password_file` without its line end, "" when none is set.

        Raises ConfigError when the file cannot be read.
        """
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"redis.password_file: cannot read {self.password_file}: {error}"
            ) from error
