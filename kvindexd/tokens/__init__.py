"""From the body of an inference request to the token ids that the engine will see."""

from kvindexd.tokens.bodies import BadBody, Request, is_inference, parse
from kvindexd.tokens.source import NoTokens, Tokens

__all__ = ["BadBody", "NoTokens", "Request", "Tokens", "is_inference", "parse"]
