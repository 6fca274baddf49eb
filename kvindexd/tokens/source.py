"""Which token ids a request has, by model."""

from __future__ import annotations

from collections.abc import Mapping

from kvindexd.tokens.bodies import Request


class NoTokens(Exception):
    """The token ids of a prompt cannot be known now; the text says why, and what to do."""


class Tokens:
    """Token ids by model. `loras`: adapter -> base model, both as clients name them."""

    def __init__(self, loras: Mapping[str, str]) -> None:
        self._loras = dict(loras)

    def base_of(self, model: str) -> tuple[str, str]:
        """(model as workers registered it, adapter name or "") of a model as clients name it."""
        base = self._loras.get(model)
        return (model, "") if base is None else (base, model)

    async def ids(self, model: str, request: Request) -> bytes:
        """The prompt as packed little-endian uint32. Raises NoTokens or BadBody."""
        ids = request.token_ids()
        if ids is None:
            raise NoTokens(f"no tokenizer is configured for model {model!r}")
        return ids
