"""The optional C modules, None where they were not built: no compiler was found at installation."""

from __future__ import annotations

try:
    from kvindexd import _chain as chain
except ImportError:
    chain = None  # type: ignore[assignment]  # a module's absence has no type

try:
    from kvindexd import _dense as dense
except ImportError:
    dense = None  # type: ignore[assignment]  # likewise

__all__ = ["chain", "dense"]
