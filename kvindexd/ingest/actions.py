"""What the sequencer is told, remembers across restarts, and asks its owner to do."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from kvindexd.ingest.backlog import Seen
from kvindexd.ingest.frame import Frame


class ReplayOutcome(enum.Enum):
    """How a replay request ended. The values are metric labels."""

    COMPLETE = "complete"  # the end marker came
    TIMEOUT = "timeout"  # it never came: silent from the start, or cut short
    FAILED = "failed"  # the request could not be sent, or the answer made no sense


class SequencerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and times (seconds) of one rank's sequencer.

    `replay`: a replay endpoint is configured. `overlap`: applied batches to ask for again, to
    compare. `history`: applied batches remembered. `buffer_*`: bounds of the live frames that
    wait for a replay. `suspect_grace`: how long an engine with an empty buffer may prove that it
    is the one we knew. `late_limit`: an unbroken run of late frames this long is a restart under
    a clock that was set back. `leftover`: how long after a reconnection it is none, since the queue
    of the connection before may still hold as many.
    """

    replay: bool
    overlap: int = 8
    history: int = 64
    buffer_batches: int = 4096
    buffer_bytes: int = 64 << 20
    backoff_base: float = 1.0
    backoff_max: float = 60.0
    suspect_grace: float = 2.0
    late_limit: int = 16
    leftover: float = 60.0


class SequencerState(msgspec.Struct, frozen=True, array_like=True):
    """What another process needs to go on: msgpack-able, about 25 bytes per batch remembered.

    `history` ascends and ends with the last applied batch. `began`: engine clock of the
    incarnation's first batch. `proven`: the replay server has returned batches before.
    """

    history: tuple[Seen, ...] = ()
    began: float | None = None
    proven: bool = False

    @classmethod
    def resume(
        cls, seq: int, ts: float, digest: int, saved: SequencerState | None = None
    ) -> SequencerState:
        """The state for a store whose last committed batch is (seq, ts, digest); seq -1 = none.

        `saved` may lag behind that or run ahead of it: what disagrees with it is left out.
        """
        if seq < 0:
            return cls()
        last = Seen(seq, ts, digest)
        if saved is None or any(one.seq == seq and one != last for one in saved.history):
            return cls((last,))
        before = tuple(one for one in saved.history if one.seq < seq)
        return cls((*before, last), saved.began, saved.proven)


class Apply(NamedTuple):
    """Decode and apply this batch now."""

    frame: Frame
    replayed: bool


class Restarted(NamedTuple):
    """A new incarnation of the engine's cache: raise the epoch, clear the rank, then go on.

    `reason`: `sequence_back`, `replay_mismatch`, `replay_conflict`, `replay_empty`, `unverified`,
    `clock_back`, `resync`, or `repair` (the same engine's buffer is read anew, because it answers
    again and holds batches that were lost while it did not). `last_seq`: where the old incarnation
    ended for us, -1 = nowhere.
    """

    reason: str
    last_seq: int


class Gap(NamedTuple):
    """Batches `first..last` are missing; a replay or a Lost follows. Each number is named once."""

    first: int
    last: int


class Lost(NamedTuple):
    """Batches `first..last` will not be had: reset the rank or keep its claims, as configured.

    `reason`: `no_replay`, `backoff`, `timeout`, `replay_failed`, `not_in_buffer`, `overflow`.
    """

    first: int
    last: int
    reason: str


class AskReplay(NamedTuple):
    """Ask the engine for everything from `start`; feed the answer back under `request_id`.

    `why`: `connect`, `gap`, `restart`, `probe`, `resync` or `repair`.
    """

    request_id: int
    start: int
    why: str


class CancelReplay(NamedTuple):
    """Nobody waits for this request any more: end it. Nothing is expected back."""

    request_id: int


class Dropped(NamedTuple):
    """A frame that is not applied; count it.

    `reason`: `duplicate`, `replay_overlap`, `late`, `undated`, `superseded`, `stale_replay`.
    """

    seq: int
    reason: str


Action = Apply | Restarted | Gap | Lost | AskReplay | CancelReplay | Dropped
