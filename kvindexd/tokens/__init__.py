"""From the body of an inference request to the token ids that the engine will see."""

from kvindexd.tokens.bodies import BadBody, Request, is_inference, parse
from kvindexd.tokens.source import NotConfigured, NoTokens, Tokens, TokenSettings

__all__ = [
    "BadBody",
    "NoTokens",
    "NotConfigured",
    "Request",
    "TokenSettings",
    "Tokens",
    "is_inference",
    "parse",
]
