"""Roles, and which of them each call needs. Pure."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """What a caller may do. `admin` may do everything."""

    READ = "read"
    """Look at workers, blocks and metrics."""
    SCORE = "score"
    """Score and pick, as gateways do."""
    ADMIN = "admin"
    """Register, remove and steer workers."""


METRICS, UI = "metrics", "ui"
"""/metrics and the other pages of the metrics port, as `needed` knows them."""

_INDEX = "kvindexd.v1.KVIndex"
_ADMIN = "kvindexd.v1.KVIndexAdmin"
_EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
_OPEN = (
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
)

_READING = frozenset(
    {
        "ListWorkers",
        "GetWorker",
        "GetBlock",
        "WalkChain",
        "IndexStats",
        "WatchWorkers",
        "Audit",
        "TailWorker",
    }
)

_ADMINS = frozenset({Role.ADMIN})
_READERS = frozenset({Role.READ, Role.ADMIN})
_SCORERS = frozenset({Role.SCORE, Role.ADMIN})
_NOBODY: frozenset[Role] = frozenset()


def needed(method: str) -> frozenset[Role]:
    """The roles of which any one is enough for a call, empty = open to all.

    `method`: `package.Service/Method`, `METRICS` or `UI`. What is not known needs admin.
    """
    service, _, name = method.partition("/")
    if service in _OPEN:
        return _NOBODY
    if service == _INDEX:
        return _SCORERS | {Role.READ} if name == "Explain" else _SCORERS
    if service == _EXT_PROC:
        return _SCORERS
    if method in (METRICS, UI) or (service == _ADMIN and name in _READING):
        return _READERS
    return _ADMINS


def is_scoring(method: str) -> bool:
    """Whether `auth.scoring` opens the call."""
    return method.partition("/")[0] in (_INDEX, _EXT_PROC)


def named(roles: frozenset[Role]) -> str:
    """Roles for people, the least first: `score or admin`."""
    return " or ".join(r.value for r in Role if r in roles)
