"""The shared truth: workers, leases, blocks and the feed, in Redis or Valkey."""

from kvindexd.store.errors import (
    Changed,
    Damaged,
    Diverged,
    Fenced,
    LeaseHeld,
    NotRegistered,
    SchemaMismatch,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnfitServer,
)
from kvindexd.store.feed import FeedEntry, FeedRead, Kind
from kvindexd.store.records import (
    ApplyResult,
    Lease,
    RenewResult,
    Snapshot,
    StoreHealth,
    WorkerRecord,
)
from kvindexd.store.store import Store, StoreOptions
from kvindexd.store.url import StoreURL, parse_url

__all__ = [
    "ApplyResult",
    "Changed",
    "Damaged",
    "Diverged",
    "FeedEntry",
    "FeedRead",
    "Fenced",
    "Kind",
    "Lease",
    "LeaseHeld",
    "NotRegistered",
    "RenewResult",
    "SchemaMismatch",
    "Snapshot",
    "Store",
    "StoreDenied",
    "StoreError",
    "StoreFull",
    "StoreHealth",
    "StoreOptions",
    "StoreURL",
    "StoreUnavailable",
    "UnfitServer",
    "WorkerRecord",
    "parse_url",
]
