"""Stand-ins for inference engines, for kvindexd's own tests and for those of its users.

`FakeEngine` speaks an engine's event wire over real sockets, with faults on demand;
`EngineProcess` runs one as a process of its own, to be killed; `BlockPool` models an engine's
prefix cache: its events, and what it would really reuse.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvindexd.testing.blockpool import BlockPool, Group, PoolExhausted, Prompt
    from kvindexd.testing.engine import FakeEngine
    from kvindexd.testing.process import EngineProcess
    from kvindexd.testing.wire import CapturedFrame, encode_batch, load_capture

__all__ = [
    "BlockPool",
    "CapturedFrame",
    "EngineProcess",
    "FakeEngine",
    "Group",
    "PoolExhausted",
    "Prompt",
    "encode_batch",
    "load_capture",
]

_HOMES = {
    "BlockPool": "blockpool",
    "CapturedFrame": "wire",
    "EngineProcess": "process",
    "FakeEngine": "engine",
    "Group": "blockpool",
    "PoolExhausted": "blockpool",
    "Prompt": "blockpool",
    "encode_batch": "wire",
    "load_capture": "wire",
}


def __getattr__(name: str) -> Any:
    # On first use: `python -m kvindexd.testing.engine` must not find its module imported already.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
