"""Message Prompt to a scoring query, with every rule of 05-api.md checked."""

from __future__ import annotations

import sys
from array import array

import numpy as np

from kvindexd import chain
from kvindexd.rpc.errors import RequestError, TooLarge, Unavailable, Unconfigured
from kvindexd.scoring.query import ChainQuery, Query
from kvindexd.tokens import BadBody, NotConfigured, NoTokens, Tokens, parse
from kvindexd.tokens.bodies import text_request
from kvindexd.v1 import index_pb2 as pb

_PATH = "/v1/chat/completions"


async def tokenized(prompt: pb.Prompt, tokens: Tokens | None) -> pb.Prompt:
    """The prompt with token ids instead of text or an OpenAI body; any other as it is.

    Raises RequestError: Unconfigured without a tokenizer for the model, Unavailable when it fails.
    """
    content = prompt.WhichOneof("content")
    if content not in ("text", "openai_body") or tokens is None:
        return prompt
    try:
        if content == "text":
            request = text_request(prompt.text, prompt.model)
        else:
            request = parse(prompt.openai_path or _PATH, prompt.openai_body)
        named = prompt.model or request.model
        model, lora = tokens.base_of(named)
        ids = await tokens.ids(model, request)
    except BadBody as e:
        raise RequestError(f"prompt.{content}: {e}") from None
    except NotConfigured as e:
        raise Unconfigured(f"prompt.{content}: {e}") from None
    except NoTokens as e:
        raise Unavailable(f"prompt.{content}: {e}") from None
    out = pb.Prompt()
    out.CopyFrom(prompt)
    out.token_ids = ids
    out.model = model
    out.lora_name = prompt.lora_name or lora
    out.cache_salt = prompt.cache_salt or request.cache_salt
    return out


def query_of(prompt: pb.Prompt, max_tokens: int) -> Query:
    """The query that a prompt asks. Raises RequestError naming the field that is wrong."""
    content = prompt.WhichOneof("content")
    if content == "token_ids":
        packed = prompt.token_ids
        if len(packed) % 4:
            raise RequestError(
                f"prompt.token_ids: {len(packed)} bytes, expected a multiple of 4 "
                "(packed little-endian uint32)"
            )
        return _tokens(packed, prompt, max_tokens)
    if content == "tokens":
        ids = array("I", prompt.tokens.ids)
        if sys.byteorder != "little":
            ids.byteswap()
        return _tokens(ids.tobytes(), prompt, max_tokens)
    if content == "chain":
        return _chain(prompt, max_tokens)
    if content in ("text", "openai_body"):
        raise Unconfigured(
            f"prompt.{content}: no tokenizer is configured for model {prompt.model!r}; send "
            "token_ids, or configure a tokenizer for the model"
        )
    raise RequestError("prompt: no content; set one of token_ids, tokens, chain, text, openai_body")


def _tokens(packed: bytes, prompt: pb.Prompt, max_tokens: int) -> Query:
    _check_length(len(packed) // 4, max_tokens)
    items = [chain.Item(i.identifier, i.offset) for i in prompt.mm_items]
    return Query(packed, lora_name=prompt.lora_name, cache_salt=prompt.cache_salt, items=items)


def _check_length(tokens: int, max_tokens: int) -> None:
    if tokens > max_tokens:
        raise TooLarge(
            f"prompt of {tokens} tokens is longer than limits.max_prompt_tokens = {max_tokens}",
            "prompt_tokens",
        )


def _chain(prompt: pb.Prompt, max_tokens: int) -> Query:
    sent = prompt.chain
    if prompt.lora_name or prompt.cache_salt or prompt.mm_items:
        raise RequestError(
            "prompt.chain: lora_name, cache_salt and mm_items are inside the hashes already; "
            "leave them empty"
        )
    if sent.packed and sent.hashes:
        raise RequestError("prompt.chain: set hashes or packed, not both")
    if len(sent.packed) % 8 or len(sent.lookahead_packed) % 8:
        raise RequestError(
            "prompt.chain: packed and lookahead_packed hold little-endian uint64, so their "
            "lengths are multiples of 8"
        )
    unit = sent.unit or chain.UNIT
    if sent.packed:
        keys = np.frombuffer(sent.packed, "<u8").astype(np.uint64)
    else:
        keys = np.array(sent.hashes, np.uint64)
    tokens = sent.tokens or len(keys) * unit
    _check_length(tokens, max_tokens)
    if tokens // unit < len(keys):
        raise RequestError(
            f"prompt.chain: {len(keys)} hashes of {unit} tokens for a prompt of {tokens} tokens"
        )
    ahead = None
    if sent.lookahead_packed:
        ahead = np.frombuffer(sent.lookahead_packed, "<u8").astype(np.uint64)
        if len(ahead) != len(keys):
            raise RequestError(
                f"prompt.chain: {len(ahead)} lookahead hashes for {len(keys)} hashes"
            )
    return ChainQuery(keys, unit, tokens, ahead)
