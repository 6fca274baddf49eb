"""One rank's sequence state machine: frames in any order in, batches in order and once out.

Pure: no sockets, no clock. Every input returns the list of actions to take, in order. What the
wire gives is a number per batch that starts at 0 with each engine process, the engine's clock, and
a replay of the last few thousand batches on request; nothing announces a restart. So:

- The number goes back while the clock goes on: a new incarnation, with replay or without.
- The number goes on, but the engine may have restarted while nobody listened: each (re)connection
  asks for a replay that overlaps what was applied, and compares. An engine that answers with other
  batches under the same numbers, or with none at all, is a new incarnation.
- A hole is filled by replay while live frames wait (bounded), or it is reported lost, once.
"""

from __future__ import annotations

import random

from kvindexd.ingest.actions import (
    Action,
    AskReplay,
    CancelReplay,
    Dropped,
    ReplayOutcome,
    Restarted,
    SequencerConfig,
    SequencerState,
)
from kvindexd.ingest.backlog import Flight
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.order import Order


class Sequencer:
    """Feed it what happens; carry out what it returns, in order.

    The caller owns the epoch: it rises by one for every Restarted, and for every Lost that the
    policy answers with a reset.
    """

    def __init__(
        self,
        config: SequencerConfig,
        state: SequencerState | None = None,
        rng: random.Random | None = None,
    ) -> None:
        state = state or SequencerState()
        self._config = config
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._order = Order(config.history, state)
        self._proven = state.proven  # the replay server has returned batches before
        self._flight: Flight | None = None
        self._requests, self._failures, self._retry_at = 0, 0, 0.0
        self._sync_pending = False  # connected, and not compared with the engine since
        self._ask_again = False  # reconnected while a request was under way
        self._live_top, self._passed = -1, -1  # newest live frame of this connection; _overtaken
        self._suspect_until: float | None = None
        self._suspected = False
        self._late_run, self._late_seq, self._leftover_until = 0, -1, 0.0

    # -- what can be asked -------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """Sequence of the last batch handed out, -1 = none."""
        return self._order.last_seq

    @property
    def syncing(self) -> bool:
        """What was applied may not be all, or not be true, and an answer is awaited.

        A replay server that does not answer is asked again and again, but stops no one for it:
        that is `unverified`, no longer `syncing`.
        """
        asking = self._flight is not None and self._failures == 0
        return asking or self._suspected or bool(self._order.held)

    @property
    def unverified(self) -> bool:
        """No replay has been had since the last (re)connection, or since one failed.

        When this falls after a Lost, the engine answers again, and what its buffer holds is read
        back, the lost batches among it.
        """
        return self._sync_pending

    @property
    def replay_failures(self) -> int:
        """Replay requests that failed in a row."""
        return self._failures

    @property
    def held(self) -> int:
        """Live frames that wait for a replay."""
        return len(self._order.held)

    @property
    def wake_at(self) -> float | None:
        """When `tick` has something to do, on the clock of `now`; None = never."""
        if self._flight is not None:
            return None
        if self._suspect_until is not None:
            return self._suspect_until
        return self._retry_at if self._sync_pending else None

    def state(self) -> SequencerState:
        """What to persist, so that another process can go on from here."""
        return SequencerState(tuple(self._order.applied), self._order.began, self._proven)

    # -- what can happen ---------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """The subscription was (re)connected: ask what the engine holds, even if it is idle."""
        out: list[Action] = []
        if self.last_seq >= 0:
            self._leftover_until = now + self._config.leftover
        if self._config.replay:
            self._sync_pending, self._live_top, self._passed = True, -1, -1
            if self._flight is not None:
                self._ask_again = True
            else:
                self._ask("connect", out)
        return out

    def live(self, frame: Frame, now: float) -> list[Action]:
        """A frame from the subscription."""
        out: list[Action] = []
        order = self._order
        known = order.applied.get(frame.seq) or order.held.get(frame.seq)
        top_seq, top_ts = order.top()
        if known is not None and known.digest == frame.digest:
            out.append(Dropped(frame.seq, "duplicate"))
        elif frame.seq > top_seq:
            if frame.seq != self.last_seq + 1 and order.is_straggler(frame):
                self._late(frame, now, out)
            else:
                self._ahead(frame, now, out)
        elif frame.ts is not None and frame.ts > top_ts:
            self._restart("sequence_back", frame, now, out)
        elif frame.seq > self.last_seq and known is None:
            self._hold(frame, now, out)  # overtaken on its way
        else:
            self._late(frame, now, out)
        return out

    def replayed(self, request_id: int, frame: Frame, now: float) -> list[Action]:
        """A batch that a replay returned (never the end marker)."""
        out: list[Action] = []
        flight = self._flight
        if flight is None or flight.id != request_id:
            return [Dropped(frame.seq, "stale_replay")]
        flight.returned += 1
        self._proven = True
        if flight.why == "repair" and flight.returned == 1:
            self._repair(flight, frame, out)
        if frame.seq > self.last_seq:
            self._take(flight, frame, now, out)
            return out
        known = self._order.applied.get(frame.seq)
        last = self._order.applied.last
        if known is not None and known.digest == frame.digest:
            flight.verified = True
            out.append(Dropped(frame.seq, "replay_overlap"))
        elif known is not None or (last and frame.ts is not None and frame.ts > last.ts):
            self._replaced(flight, frame, now, out)
        else:
            out.append(Dropped(frame.seq, "replay_overlap"))
        return out

    def replay_ended(self, request_id: int, outcome: ReplayOutcome, now: float) -> list[Action]:
        """The replay client is done with a request, for better or worse."""
        out: list[Action] = []
        flight = self._flight
        if flight is None or flight.id != request_id:
            return out
        self._flight = None
        if outcome is ReplayOutcome.COMPLETE:
            self._failures, self._retry_at = 0, now
            if flight.why == "repair":
                self._order.missed = -1
            heard = self._live_top >= 0 and self._order.held and not self._proven
            if flight.start <= flight.top and flight.returned == 0 and not heard:
                self._nothing_there(flight, now, out)
                return out
            self._sync_pending = False
            reason = "not_in_buffer"
        else:
            self._back_off(now)
            reason = "timeout" if outcome is ReplayOutcome.TIMEOUT else "replay_failed"
        self._suspected, self._suspect_until = False, None
        self._settle(flight, reason, now, out)
        if self._flight is None and outcome is ReplayOutcome.COMPLETE and self._order.missed >= 0:
            self._sync_pending = True
            self._ask("repair", out, from_zero=True)
        return out

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call it at `wake_at`."""
        out: list[Action] = []
        if self._flight is None and self.wake_at is not None and now >= self.wake_at:
            self._suspect_until = None
            why = "repair" if self._order.missed >= 0 else "connect"
            why = "probe" if self._suspected else why
            self._ask(why, out, from_zero=why != "connect")
        return out

    def resync(self, now: float) -> list[Action]:
        """Forget everything and read the engine's buffer from its beginning."""
        out: list[Action] = []
        self._forget("resync", out)
        if self._config.replay:
            self._sync_pending = True
            self._ask("resync", out)
        return out

    # -- live frames -------------------------------------------------------------------------

    def _ahead(self, frame: Frame, now: float, out: list[Action]) -> None:
        self._live_top = frame.seq
        if self._flight is not None:
            self._hold(frame, now, out)
        elif self._suspected:
            # It speaks: compare again, now that its buffer cannot be empty.
            self._suspected, self._suspect_until = False, None
            self._order.held.add(frame)
            self._ask("probe", out)
        elif frame.seq == self.last_seq + 1:
            self._apply(frame, False, out)
        else:
            self._order.held.add(frame)
            self._order.report_gap(frame.seq, out)
            if not self._config.replay:
                self._order.give_up("no_replay", out)
            elif now < self._retry_at:
                self._order.give_up("backoff", out)
            else:
                self._ask("gap", out)

    def _hold(self, frame: Frame, now: float, out: list[Action]) -> None:
        config, held = self._config, self._order.held
        held.add(frame)
        if len(held) <= config.buffer_batches and held.bytes <= config.buffer_bytes:
            return
        if self._flight is not None and self._flight.returned == 0:
            self._back_off(now)
        self._cancel(out)
        self._order.give_up("overflow", out)

    def _late(self, frame: Frame, now: float, out: list[Action]) -> None:
        """Behind, and not newer: dropped. A long unbroken run of these is a clock set back."""
        # What the connection before had left in a queue comes after, or among, what is new.
        run = self._late_run if now >= self._leftover_until else -1
        self._late_run = run + 1 if frame.seq > self._late_seq else 1
        self._late_seq = frame.seq
        if frame.ts is not None and self._late_run >= self._config.late_limit:
            self._restart("clock_back", frame, now, out)
        else:
            out.append(Dropped(frame.seq, "late" if frame.ts is not None else "undated"))

    def _restart(self, reason: str, frame: Frame, now: float, out: list[Action]) -> None:
        self._forget(reason, out)
        self._ahead(frame, now, out)

    # -- replayed frames ---------------------------------------------------------------------

    def _take(self, flight: Flight, frame: Frame, now: float, out: list[Action]) -> None:
        """A replayed batch that is new to us."""
        order, held = self._order, self._order.held
        rival = held.get(frame.seq)
        if rival is not None:
            held.pop(frame.seq)
            if rival.digest == frame.digest:
                out.append(Dropped(frame.seq, "duplicate"))
            elif rival.ts is not None and frame.ts is not None and rival.ts > frame.ts:
                self._restart("replay_conflict", rival, now, out)
                return
            else:
                out.append(Dropped(frame.seq, "superseded"))
        order.release(out, below=frame.seq)
        if frame.seq > self.last_seq + 1 and flight.applied:
            # A hole inside one reply: the sender's queue ran over. The batches are in its buffer.
            self._cancel(out)
            order.report_gap(frame.seq, out)
            self._ask("gap", out)
            return
        if self.last_seq + 1 < frame.seq and self._passed != self._live_top < frame.seq - 1:
            self._overtaken(now, out)
            return
        unproven = not flight.verified and flight.start <= flight.last and flight.why != "gap"
        if unproven and frame.seq == self.last_seq + 1:
            # Nothing in it can be compared. Either the engine's buffer happened to begin there, or
            # another process got that far: rare both, and only a clear is right in both.
            self._reset("unverified", out)
        order.close_holes(frame.seq, "not_in_buffer", out)
        self._apply(frame, True, out)
        flight.applied += 1
        flight.verified = True

    def _repair(self, flight: Flight, frame: Frame, out: list[Action]) -> None:
        """The first batch of a buffer that is read for the sake of lost ones. Only now is anything
        forgotten: a server that is silent again, or has none of them any more, costs nothing."""
        if frame.seq <= self._order.missed:
            self._reset("repair", out)
            flight.verified = True
        self._order.missed = -1

    def _overtaken(self, now: float, out: list[Action]) -> None:
        """The buffer begins beyond what has come live: we are behind, and what lies between is on
        its way. Go on with that, and ask again soon; if nothing came by then, it is not."""
        self._passed = self._live_top
        self._cancel(out)
        self._sync_pending, self._retry_at = True, now + self._config.backoff_base
        self._order.give_up("not_in_buffer", out)

    def _replaced(self, flight: Flight, frame: Frame, now: float, out: list[Action]) -> None:
        """The engine holds other batches under numbers that we applied: it was restarted."""
        held = self._order.held
        for waiting in held.drain():
            if waiting.ts is not None and frame.ts is not None and waiting.ts >= frame.ts:
                held.add(waiting)
            else:
                out.append(Dropped(waiting.seq, "superseded"))
        self._reset("replay_mismatch", out)
        if flight.start == 0 and flight.returned == 1:
            flight.verified = True  # this very reply tells it from the beginning
            self._take(flight, frame, now, out)
            return
        self._cancel(out)
        self._ask("restart", out)

    def _nothing_there(self, flight: Flight, now: float, out: list[Action]) -> None:
        """Only the end marker, for a start that a live engine of our incarnation must hold.

        The newest batch is always in its buffer. So this engine has published fewer batches than
        that, or it keeps no buffer. Ask from 0; an empty buffer there convicts a server that has
        returned batches before, else one that is still silent after a grace period. (A server
        that never returned any, of an engine that was just heard, simply keeps none.)
        """
        again, self._ask_again = self._ask_again, False
        if again:
            self._ask("connect", out)  # that reply was from before the reconnection
        elif flight.start > 0:
            self._ask("probe", out, from_zero=True)
        elif self._proven or self._suspected:
            self._sync_pending = False
            self._forget("replay_empty", out)
        else:
            self._suspected = True
            self._suspect_until = now + self._config.suspect_grace

    def _settle(self, flight: Flight, reason: str, now: float, out: list[Action]) -> None:
        """After a reply: release what waits; ask again where it can help, else report the loss."""
        order = self._order
        order.release(out)
        if order.held:
            order.report_gap(order.held.lowest, out)
        again, self._ask_again = self._ask_again, False
        # No use asking twice for a hole that was known when the request was sent.
        helps = order.held and (flight.applied or order.held.lowest > flight.top)
        if again or helps:
            self._ask("connect" if again else "gap", out)
        else:
            order.give_up(reason, out)

    # -- requests ----------------------------------------------------------------------------

    def _ask(self, why: str, out: list[Action], *, from_zero: bool = False) -> None:
        order = self._order
        start = 0 if from_zero else order.applied.overlap_start(self._config.overlap)
        self._requests += 1
        self._flight = Flight(self._requests, start, why, order.last_seq, order.top()[0])
        out.append(AskReplay(self._requests, start, why))

    def _cancel(self, out: list[Action]) -> None:
        if self._flight is not None:
            out.append(CancelReplay(self._flight.id))
            self._flight = None
        self._ask_again = False

    def _back_off(self, now: float) -> None:
        self._sync_pending = True  # what was lost may be had yet, see `unverified`
        wait = min(self._config.backoff_max, self._config.backoff_base * 2.0**self._failures)
        self._failures = min(self._failures + 1, 32)
        self._retry_at = now + wait * self._rng.uniform(0.5, 1.0)

    def _apply(self, frame: Frame, replayed: bool, out: list[Action]) -> None:
        self._late_run = 0
        self._order.hand_out(frame, replayed, out)

    def _forget(self, reason: str, out: list[Action]) -> None:
        """A new incarnation: nothing that was asked for, held or applied speaks of it."""
        self._cancel(out)
        out.extend(Dropped(frame.seq, "superseded") for frame in self._order.held.drain())
        self._reset(reason, out)

    def _reset(self, reason: str, out: list[Action]) -> None:
        self._suspected, self._suspect_until = False, None
        self._late_run, self._late_seq = 0, -1
        out.append(Restarted(reason, self._order.clear()))
