"""What the store raises: a small tree, so that callers can tell retry, step down and give up."""

from __future__ import annotations


class StoreError(Exception):
    """The store refused or could not do what was asked."""


class StoreUnavailable(StoreError):
    """No usable server within the deadline. Trying again later is right; nothing is known to be
    lost, and whether the last command took effect is unknown (all of ours may be repeated)."""


class StoreDenied(StoreError):
    """The server answered and refused us: password, ACL rule or certificate. Do not retry."""


class StoreFull(StoreError):
    """The server is at `maxmemory`. Removals and clears still work.

    `applied`: how many leading deltas of the call were removals only, and are written.
    """

    def __init__(self, message: str, applied: int = 0) -> None:
        super().__init__(message)
        self.applied = applied


class SchemaMismatch(StoreError):
    """The keys in this Redis were written by a kvindexd with another layout."""


class UnfitServer(StoreError):
    """The server cannot hold the index safely: too old, evicting, or of the wrong kind."""


class NotRegistered(StoreError):
    """The worker rank is not (or no longer) registered."""


class Changed(StoreError):
    """The worker rank is not what a conditional registration was to replace. Look again."""


class LeaseHeld(StoreError):
    """Another ingester owns the worker rank. `expires_in`: seconds until its lease lapses."""

    def __init__(self, worker: str, owner: str, expires_in: float) -> None:
        super().__init__(
            f"worker {worker} is owned by {owner!r} for another {expires_in:.1f} s; "
            "wait for its lease to lapse, or stop it"
        )
        self.owner = owner
        self.expires_in = expires_in


class Fenced(StoreError):
    """Our lease was taken over, released or revoked: stop writing and acquire anew."""

    def __init__(self, worker: str, owner: str) -> None:
        who = f"now owned by {owner!r}" if owner else "now owned by nobody"
        super().__init__(f"the lease of worker {worker} is not ours any more ({who})")
        self.owner = owner


class Diverged(StoreError):
    """The stored (epoch, revision) is not what the writer last wrote, so its memory is no longer
    the continuation of the store (typically a failover that lost the last writes). Acquire and
    load again."""

    def __init__(self, worker: str, expected: tuple[int, int], found: tuple[int, int]) -> None:
        super().__init__(
            f"worker {worker}: expected epoch {expected[0]} revision {expected[1]}, "
            f"the store has epoch {found[0]} revision {found[1]}; load it again"
        )
        self.expected = expected
        self.found = found


class Damaged(StoreError):
    """Fields of a worker's blocks are missing that nobody removed through us (keys deleted or
    evicted behind our back): the worker must be cleared and replayed."""

    def __init__(self, worker: str, expected: int, found: int) -> None:
        super().__init__(
            f"worker {worker}: {expected} records were written and {found} are there; something "
            "else deletes keys of this Redis. Clear the worker and replay it"
        )
