"""Explain: block by block what each rank holds, and where the prompt leaves the index."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from kvindexd.fleet import Chosen, Member, Scope
from kvindexd.scoring.explain import MISSING, PREDICTED, Run, runs
from kvindexd.scoring.nearest import (
    CAUSES,
    TOKEN_CHANGES,
    VOCABULARY,
    Shape,
    Variation,
    first_block_held,
    first_tokens,
    known_roots,
    of_first_token,
    shapes,
    variations,
)
from kvindexd.scoring.picker import Choice, Picker
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Probes, Scored, TablePresence, score
from kvindexd.survey import Survey
from kvindexd.v1 import index_pb2 as pb

_ROWS = 1 << 16
"""Rows of a table surveyed at once: a millisecond."""
_YIELD_SECONDS = 0.002
_SEARCH_SECONDS = 3.0
"""How long first tokens may be tried, without the time that others had in between."""
_SHOWN = 8


class Scopes(Protocol):
    """All models of all namespaces."""

    def scopes(self) -> list[Scope]:
        """Those that have a registered rank."""
        ...


class Asked(NamedTuple):
    """A prompt, the ranks that it was asked of, their scores by events alone, and the adapters
    that the model is known to have. `searching`: held by whoever tries first tokens."""

    scope: Scope
    query: Query
    chosen: Chosen
    scored: Sequence[Scored]
    adapters: Sequence[str]
    searching: asyncio.Lock


def add_groups(
    explained: pb.WorkerExplanation, asked: Asked, choice: Choice, picker: Picker
) -> None:
    """What a rank holds of the prompt, group by group."""
    shape, query = choice.member.candidate, asked.query
    presence = TablePresence(Probes(asked.scope.table, query), shape.geometry, [shape.column])
    if not shape.geometry.block_size or query.keys(shape.geometry.unit) is None:
        return
    for run in runs(presence, shape.geometry, query.tokens):
        explained.groups.add(
            group=pb.Group(
                idx=max(0, run.spec.idx),
                kind=run.spec.kind,
                block_size=run.spec.block_size,
                sliding_window=run.spec.window,
                treated_as="main" if run.spec in shape.geometry.main else "auxiliary",
            ),
            held=_with_predicted(asked.query, choice, run, picker),
            stops_at=run.stops_at,
            why=run.why,
        )


def _with_predicted(query: Query, choice: Choice, run: Run, picker: Picker) -> bytes:
    """A run's bytes with the blocks that are missing and predicted marked as such."""
    predicted = picker.predicted_blocks(query, choice.member, run.spec.block_size, time.monotonic())
    held = bytearray(run.held)
    for i, yes in enumerate(predicted):
        if yes and held[i] == MISSING:
            held[i] = PREDICTED
    return bytes(held)


async def divergence(asked: Asked, fleet: Scopes) -> pb.Divergence | None:
    """Where the prompt leaves what these ranks hold; None where it does not, or is too short for
    any block. Lets others run every few milliseconds."""
    held, size = _farthest(asked)
    query = asked.query
    if size and (held >= query.tokens // size * size):
        return None
    found = pb.Divergence(held_tokens=held, before_token=held + size)
    survey = await _survey(asked, held)
    found.continuations, found.roots = survey.branches, len(survey.roots)
    found.detail = _detail(asked, held, size, survey)
    if not held:
        await _look_around(found, asked, survey, fleet)
        _conclude(found)
    if found.before_token > held + 1:
        found.unknown.append(
            f"which of the tokens {held:,} to {found.before_token - 1:,} differs, if one does: "
            "the index holds hashes, no tokens; `kvindexd explain --against` compares with a "
            "second prompt"
        )
    return found


def _farthest(asked: Asked) -> tuple[int, int]:
    """(tokens held by the rank that holds most, its block size; 0 = none has shown any)."""
    best = max(asked.scored, key=lambda s: (_held(s), -s.block_size), default=Scored())
    sizes = [s.block_size for s in asked.scored if s.block_size]
    return _held(best), best.block_size or min(sizes, default=0)


def _held(scored: Scored) -> int:
    # A rank without a main group matches nothing and may well resume.
    return max(scored.matched, scored.reusable)


async def _survey(asked: Asked, held: int) -> Survey:
    query, at, known = asked.query, asked.query.root, set[int]()
    kinds = shapes(m.candidate.geometry for m in asked.chosen.members)
    for unit, lookahead, size in kinds:
        keys, names = query.keys(unit), query.names(unit, lookahead, size)
        if held and keys is not None and held % unit == 0 and held // unit <= len(keys):
            at = int(keys[held // unit - 1])
        if names is not None and held // size < len(names):
            known.add(int(names[held // size]))
    survey = Survey(at, {s.size for s in kinds}, known)
    for low in itertools.count(1, _ROWS):
        links = asked.scope.table.links(low, _ROWS)
        if links is None:
            return survey
        survey.add(links)
        await asyncio.sleep(0)
    raise AssertionError("counts for ever")  # for the type checker


def _detail(asked: Asked, held: int, size: int, survey: Survey) -> str:
    if not asked.chosen.members:
        n = len(asked.scope.members)
        return f"state and filters leave out all of the model's {n} workers"
    if not size:
        return (
            "no worker of the model has shown any block yet: see its state and detail in "
            "`kvindexd workers list`"
        )
    branches, begun = survey.branches, sum(survey.roots.values())
    if not held:
        if not begun:
            return "nothing is held that begins a prompt"
        here = survey.roots.get(asked.query.root, 0)
        none = f"no worker holds the first block (of {size:,} tokens); first blocks known: "
        if not asked.query.packed:
            return f"{none}{begun:,}"
        return f"{none}{here:,} with the same adapter and salt, {begun - here:,} with others"
    if branches:
        return (
            f"{held:,} tokens are held; other blocks known to follow: {branches:,}. Either this "
            f"prompt differs at a token from {held:,} to {held + size - 1:,}, or its own block was "
            "never computed or has been evicted"
        )
    return (
        f"{held:,} tokens are held, and no other block is known to follow: what comes next was "
        "never computed, or has been evicted"
    )


def _conclude(found: pb.Divergence) -> None:
    """What the variations that are held say of the first differing token."""
    changes = {v.change for v in found.variations}
    if not changes:
        found.detail += f". {CAUSES}"
    elif changes <= TOKEN_CHANGES:
        found.before_token = 1
        found.detail += "; but a changed form of the prompt is held: its first token differs"
    else:
        found.before_token = 0
        found.detail += "; but the same tokens are held elsewhere: what differs is no token"


async def _look_around(found: pb.Divergence, asked: Asked, survey: Survey, fleet: Scopes) -> None:
    """Nothing is held: look for what is nearly the same."""
    query, scope = asked.query, asked.scope
    kinds = sorted(shapes(m.candidate.geometry for m in scope.members))
    matches: list[tuple[int, pb.PromptVariation]] = []

    def consider(
        change: str, detail: str, q: Query, where: Scope, members: Sequence[Member]
    ) -> None:
        best, workers = _best(where, q, members)
        if best:
            message = pb.PromptVariation(change=change, detail=detail, matched_tokens=best)
            message.workers.extend(workers)
            matches.append((best, message))

    asked_of = {m.key for m in asked.chosen.members}
    left_out = [m for m in scope.members if m.key not in asked_of]
    if left_out:
        found.tried.append(f"{len(left_out)} workers that state or filters leave out")
        detail = "as it is, on workers that their state or the request's filters leave out"
        consider("candidates", detail, query, scope, left_out)
    await _elsewhere(found, asked, fleet, consider)
    if not query.packed:
        found.unknown.append("other forms of the prompt: hashes were sent, no tokens")
    else:
        known = known_roots(query.lora_name, query.cache_salt, asked.adapters)
        n = len((known.keys() | survey.roots.keys()) - {query.root})
        found.tried.append(f"{n} other roots (adapters and salts), and up to 64 tokens dropped")
        pause = _Pause()
        for v in variations(query, survey.roots, known):
            if first_block_held(scope.table, v.query, kinds):
                consider(*v, scope, scope.members)
            await pause()
        if not matches:
            if asked.searching.locked():
                found.unknown.append("other first tokens: another call tries its own just now")
            else:
                async with asked.searching:
                    async for v in _by_first_token(found, query, scope, kinds):
                        consider(*v, scope, scope.members)
    matches.sort(key=lambda m: -m[0])
    found.variations.extend(message for _, message in matches[:_SHOWN])


async def _elsewhere(
    found: pb.Divergence,
    asked: Asked,
    fleet: Scopes,
    consider: Callable[[str, str, Query, Scope, Sequence[Member]], None],
) -> None:
    others = [
        s
        for s in fleet.scopes()
        if (s.namespace, s.model) != (asked.scope.namespace, asked.scope.model)
    ]
    if others:
        found.tried.append(f"{len(others)} other models and namespaces")
    for other in others:
        change = "model" if other.namespace == asked.scope.namespace else "namespace"
        where = f"model {other.model!r} in namespace {other.namespace!r}"
        for unit in other.usual.units:
            await asked.query.hash(unit)
        consider(change, f"as it is, for {where}", asked.query, other, other.members)
        await asyncio.sleep(0)


async def _by_first_token(
    found: pb.Divergence, query: Query, scope: Scope, kinds: Sequence[Shape]
) -> AsyncIterator[Variation]:
    """The form of the prompt with another first token that somebody holds."""
    if query.items:
        found.unknown.append("another first token: not tried for prompts with media")
        return
    found.tried.append(f"first tokens below {VOCABULARY:,}, added and replaced")
    spent, since = 0.0, time.perf_counter()
    for hit in first_tokens(scope.table, query, kinds):
        if hit is not None:
            yield of_first_token(query, hit[0], added=hit[1])
            return
        spent += time.perf_counter() - since
        if spent > _SEARCH_SECONDS:
            found.unknown.append(f"other first tokens: {_SEARCH_SECONDS:g} s were not enough")
            return
        await asyncio.sleep(0)
        since = time.perf_counter()


def _best(scope: Scope, query: Query, members: Sequence[Member]) -> tuple[int, list[str]]:
    """(most tokens that any rank holds, the ranks that hold so many)."""
    scored = score(scope.table, query, [m.candidate for m in members])
    best = max(map(_held, scored), default=0)
    most = [m.key for m, s in zip(members, scored, strict=True) if _held(s) == best]
    return best, [k.worker_id + (f"#{k.dp_rank}" if k.dp_rank else "") for k in most]


class _Pause:
    """Lets others run when this task has had its turn."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def __call__(self) -> None:
        if time.perf_counter() - self._since > _YIELD_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
