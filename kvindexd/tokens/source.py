"""Which token ids a request has, by model: cached, bounded in time, and loud when it fails."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import structlog
import xxhash

from kvindexd import tracing
from kvindexd.tokens.bodies import Request
from kvindexd.tokens.chat import Unsupported
from kvindexd.tokens.engine import EngineTokenizer
from kvindexd.tokens.http import HttpClient
from kvindexd.tokens.local import LocalTokenizer, TokenizerFailed

log = structlog.get_logger(__name__)
ENGINE = "engine"
"""Setting of a model whose live workers are asked."""
_THREADS = 2
_WAITING = 64
"""Prompts being tokenized at once, per process; more are not waited for."""
_RETRY = 5.0
"""Seconds for which a tokenizer that failed is left alone."""


class NoTokens(Exception):
    """The token ids of a prompt cannot be known now; the text says why, and what to do."""


class NotConfigured(NoTokens):
    """The model has no tokenizer, and the prompt is text."""


class TokenSettings(NamedTuple):
    """`models`: name -> path of a tokenizer, "engine", or URL of a server with `/tokenize`.
    `loras`: adapter -> base model. `timeout`: seconds. `cache_tokens`: ids kept, all prompts
    together."""

    models: Mapping[str, str]
    loras: Mapping[str, str]
    timeout: float = 2.0
    cache_tokens: int = 4_000_000


class _Source(Protocol):
    async def load(self) -> None: ...
    async def ids(self, request: Request) -> bytes: ...


class _State:
    """One model's tokenizer and how it fares."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.problem = ""
        self.retry_at = 0.0


class Tokens:
    """Token ids by model. `close` ends what is under way."""

    def __init__(
        self,
        settings: TokenSettings,
        worker_of: Callable[[str], str | None] = lambda _: None,
        on_failure: Callable[[str], None] = lambda _: None,
        resolve: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        """`worker_of`: host:port of a live worker of a model. `on_failure`: told the model.
        `resolve`: gives the address to connect to for a worker's host, see HttpClient."""
        self._settings = settings
        self._worker_of = worker_of
        self._on_failure = on_failure
        self._client, self._engines = HttpClient(), HttpClient(resolve)
        self._executor = ThreadPoolExecutor(_THREADS, "tokenize")
        self._states = {m: _State(self._source(m, s)) for m, s in settings.models.items()}
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cached = 0
        self._running: dict[bytes, asyncio.Task[bytes]] = {}

    def _source(self, model: str, setting: str) -> _Source:
        if setting == ENGINE:

            def base() -> str | None:
                address = self._worker_of(model)
                return f"http://{address}" if address else None

            return EngineTokenizer(self._engines, base)
        if setting.startswith(("http://", "https://")):
            return EngineTokenizer(self._client, lambda: setting.rstrip("/"))
        return LocalTokenizer(setting, self._executor)

    def adapters_of(self, model: str) -> list[str]:
        """Names of the adapters that are configured for a base model."""
        return sorted(name for name, base in self._settings.loras.items() if base == model)

    async def start(self) -> None:
        """Read tokenizers' files; one that cannot be read is logged, and tried again later."""
        await self._load(self._states)

    async def _load(self, states: Mapping[str, _State]) -> None:
        for model, state in states.items():
            try:
                async with asyncio.timeout(30):
                    await state.source.load()
            except (TokenizerFailed, TimeoutError) as e:
                self._failed(model, state, str(e) or "its files are not read within 30 s")

    async def reload(self, settings: TokenSettings) -> None:
        """Take other settings; what was known of a model whose setting is the same stays."""
        before, self._settings = self._settings, settings
        kept = {m for m, s in settings.models.items() if before.models.get(m) == s}
        added = {m: _State(self._source(m, s)) for m, s in settings.models.items() if m not in kept}
        await self._load(added)
        self._states = {m: added.get(m) or self._states[m] for m in settings.models}
        if before.models != settings.models:
            self._cache.clear()
            self._cached = 0

    async def close(self) -> None:
        """End what is under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self._client.close()
        await self._engines.close()

    def base_of(self, model: str) -> tuple[str, str]:
        """(model as workers registered it, adapter name or "") of a model as clients name it."""
        base = self._settings.loras.get(model)
        return (model, "") if base is None else (base, model)

    async def ids(self, model: str, request: Request) -> bytes:
        """The prompt as packed little-endian uint32; `model` as workers registered it.

        What a caller gives up waiting for goes on, up to the time limit, and is there for the
        next who asks. Raises NoTokens (NotConfigured) or BadBody.
        """
        ids = request.token_ids()
        if ids is not None:
            return ids
        with tracing.span("tokens") as span:
            ids, cached = await self._known_or_made(model, request)
            if span is not None:
                span.set(
                    {
                        "gen_ai.request.model": model,
                        "kvindexd.prompt_tokens": len(ids) // 4,
                        "kvindexd.cached": cached,
                    }
                )
        return ids

    async def _known_or_made(self, model: str, request: Request) -> tuple[bytes, bool]:
        """(ids, whether they were known)."""
        if not model and len(self._states) == 1:
            model = next(iter(self._states))
        state = self._state(model)
        key = _key(model, request)
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known, True
        task = self._running.get(key)
        if task is None:
            if time.monotonic() < state.retry_at:
                raise NoTokens(state.problem)
            if len(self._running) >= _WAITING:
                raise NoTokens(f"{len(self._running)} prompts are being tokenized already")
            task = asyncio.create_task(self._tokenize(model, state, key, request))
            self._running[key] = task
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task), False

    def _state(self, model: str) -> _State:
        state = self._states.get(model)
        if state is None:
            raise NotConfigured(
                f"no tokenizer is configured for model {model!r}; send token ids, or set "
                'tokens.models to its tokenizer\'s folder or to "engine"'
            )
        return state

    async def _tokenize(self, model: str, state: _State, key: bytes, request: Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.timeout):
                ids = await state.source.ids(request)
        except Unsupported as e:
            raise NoTokens(str(e)) from None
        except (TokenizerFailed, TimeoutError) as e:
            why = str(e) or f"no token ids within tokens.timeout = {self._settings.timeout:g} s"
            self._failed(model, state, why)
            raise NoTokens(state.problem) from None
        if state.problem:
            log.info("tokenizer_works_again", model=model)
            state.problem = ""
        if state in self._states.values():
            self._keep(key, ids)  # not what a tokenizer said that has been replaced meanwhile
        return ids

    def _failed(self, model: str, state: _State, why: str) -> None:
        self._on_failure(model)
        problem = f"the tokenizer of model {model!r} does not work: {why}"
        if not state.problem:
            log.error("tokenizer_failed", model=model, why=why, cost="picks by load alone")
        state.problem = problem
        state.retry_at = time.monotonic() + _RETRY

    def _done(self, key: bytes, task: asyncio.Task[bytes]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; nobody may

    def _keep(self, key: bytes, ids: bytes) -> None:
        limit = 4 * self._settings.cache_tokens
        if key in self._cache or len(ids) > limit:
            return
        self._cache[key] = ids
        self._cached += len(ids)
        while self._cached > limit:
            _, oldest = self._cache.popitem(last=False)
            self._cached -= len(oldest)


def _key(model: str, request: Request) -> bytes:
    """A name for everything that the token ids depend on."""
    hasher = xxhash.xxh3_128()
    for part in (model.encode(), request.kind.encode(), *request.body.content()):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
