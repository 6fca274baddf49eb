"""kvindexd: one index of a fleet's KV-cache events, and answers about prompts."""

from kvindexd._version import __version__

__all__ = ["__version__"]
