"""The Lua scripts, read from beside this module once, each with the shared prelude before it."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """One script: its text, and the hash by which a server that knows it runs it."""

    name: str
    text: str
    sha: str


def load(name: str) -> Script:
    """Read `<name>.lua`. Raises FileNotFoundError: the installation is incomplete."""
    folder = files("kvindexd.store")
    text = (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ACQUIRE = load("acquire")
APPLY = load("apply")
ASK = load("ask")
DEREGISTER = load("deregister")
DRAIN = load("drain")
LOAD = load("load")
META = load("meta")
REGISTER = load("register")
RELEASE = load("release")
RENEW = load("renew")
RESET = load("reset")
