"""Error replies: what they mean for the caller, in words that say what to do."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import NoReturn

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from kvindexd.store.errors import StoreDenied, StoreError, StoreFull
from kvindexd.store.url import Endpoint, StoreURL

# Error codes by what to do. Redis 6.2 wraps a script's error: the code is then inside the text.
NOT_MASTER = ("READONLY", "MASTERDOWN", "UNBLOCKED")
LATER = ("LOADING", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF", "BUSY")
ACL = (
    "~kvx:* +@connection -@dangerous +info +time +role +cluster|slots +memory|usage +eval +evalsha "
    "+exists +unlink +hset +hget +hmget +hgetall +hdel +hexists +hlen +hincrby +hscan "
    "+zadd +zrem +zrange +zscore +xadd +xread +xrevrange"
)
"""What an ACL user of kvindexd needs, and no more: the rules to give to ACL SETUSER."""

_DENIED = ("NOPERM", "NOAUTH", "WRONGPASS")
_DENIED_INSIDE = ("The user executing the script can't", "ACL failure in script")
"""What servers since Redis 7 say instead of a code when a script lacks a right."""

# redis-py has classes for some codes, and takes the code out of their text.
_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (OutOfMemoryError, "OOM"),
    (ReadOnlyError, "READONLY"),
    (MasterDownError, "MASTERDOWN"),
    (TryAgainError, "TRYAGAIN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (BusyLoadingError, "LOADING"),
    (NoPermissionError, "NOPERM"),
    (AuthenticationError, "WRONGPASS"),
    (AuthorizationError, "NOPERM"),
)


def has_code(error: BaseException, codes: Sequence[str]) -> bool:
    """Whether an error reply carries one of the codes, also from inside a Redis 6.2 script."""
    if any(isinstance(error, kind) and code in codes for kind, code in _CODES):
        return True
    text = str(error)
    return text.split(" ", 1)[0] in codes or any(f"-{code} " in text for code in codes)


def redirection(error: AskError, asked: Endpoint) -> Endpoint:
    """The target of a MOVED or ASK reply; an empty host means the one that was asked."""
    return Endpoint(error.host or asked.host, error.port)


def raise_reply(error: ResponseError, op: str, url: StoreURL) -> NoReturn:
    """Raise the StoreError that an error reply stands for."""
    if has_code(error, ("OOM",)):
        raise StoreFull(
            f"{url}: the server is at maxmemory, {op!r} refused; raise maxmemory or forget workers"
        ) from error
    if has_code(error, _DENIED) or any(words in str(error) for words in _DENIED_INSIDE):
        raise StoreDenied(
            f"{url}: {op!r} is not allowed: {error}; the ACL user needs: {ACL}"
        ) from error
    raise StoreError(f"{url}: {op!r} failed: {error}") from error


def raise_if_denied(error: BaseException, url: StoreURL) -> None:
    """Raise StoreDenied for failures to connect that no retry mends."""
    if has_code(error, ("NOPERM",)):
        raise StoreDenied(f"{url}: {error}; the ACL user needs: {ACL}") from error
    if has_code(error, _DENIED):
        raise StoreDenied(f"{url}: {error}; check user and password in the store URL") from error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise StoreDenied(
                f"{url}: the server's certificate is not trusted: {cause.verify_message}; "
                "set ssl_ca_certs in the store URL"
            ) from error
        cause = cause.__cause__ or cause.__context__
