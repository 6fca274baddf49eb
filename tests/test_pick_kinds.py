"""Predictions and costs where workers are not plain: window and state groups, EAGLE, tiers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fleet_sim import fresh

from kvindexd import chain
from kvindexd.fleet import Member
from kvindexd.model import GroupInfo, Plane, Profile, WorkerKey
from kvindexd.registration import Registration
from kvindexd.scoring.cost import Weights, ceiling, miss_blocks
from kvindexd.scoring.geometry import WorkerOptions, geometry
from kvindexd.scoring.picker import Picker
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Scored, candidate

NOW = 100.0


def profile(*groups: tuple[str, int, int, str], lookahead: int = 0, pairs: bool = False) -> Profile:
    """Groups as (kind, block size, window, treated as), all seen on the device."""
    return Profile(
        lookahead=lookahead,
        pairs=pairs,
        groups=tuple(GroupInfo(i, k, b, w, t, 1) for i, (k, b, w, t) in enumerate(groups)),
        planes=tuple(Plane(0, k, b, w, b) for k, b, w, _ in groups),
    )


PLAIN = profile(("full_attention", 16, 0, "main"))
STATE = profile(("full_attention", 16, 0, "main"), ("mamba", 64, 0, "auxiliary"))
WINDOW = profile(("full_attention", 16, 0, "main"), ("sliding_window", 16, 128, "auxiliary"))
UNKNOWN = Profile()


def member(shape: Profile, options: WorkerOptions = WorkerOptions(), **fields: object) -> Member:  # noqa: B008
    registration = Registration(worker_id="w", model="m", **fields)  # type: ignore[arg-type]
    return Member(
        WorkerKey("", "w", 0), registration, candidate(0, shape, options, True), "LIVE", 0, 1
    )


def query(tokens: Sequence[int]) -> Query:
    return Query(chain.pack_tokens(tokens))


def picked(who: Member, tokens: Sequence[int]) -> Picker:
    """A picker that has sent a prompt to a worker that holds nothing."""
    picker, asked = Picker(), query(tokens)
    size = who.candidate.geometry.block_size
    picker.take("r", picker.rank(asked, [who], [Scored(block_size=size)], NOW)[0], asked, NOW, 60)
    return picker


def predicted(picker: Picker, who: Member, tokens: Sequence[int], now: float = NOW) -> Scored:
    scored = Scored(block_size=who.candidate.geometry.block_size)
    return picker.with_predictions(query(tokens), [who], [scored], now)[0]


@pytest.mark.parametrize("shape", [PLAIN, UNKNOWN], ids=["plain", "unknown"])
def test_plain_worker_is_predicted_to_hold_every_prefix(shape: Profile) -> None:
    who, tokens = member(shape), fresh(10)
    picker = picked(who, tokens)
    assert predicted(picker, who, tokens)[:2] == (160, 144)  # the last token is computed
    assert predicted(picker, who, tokens + fresh(3)).reusable == 160
    assert predicted(picker, who, tokens[:80] + fresh(3)).reusable == 80
    found = predicted(picker, who, tokens[:80] + fresh(3))
    assert found.predicted == found.device == found.reusable
    assert predicted(picker, who, fresh(10)).predicted == 0
    assert predicted(picker, who, tokens, NOW + 2.1).predicted == 0


@pytest.mark.parametrize(("shape", "end"), [(STATE, 640), (WINDOW, 688)], ids=["state", "window"])
def test_state_and_window_groups_are_predicted_at_the_prompt_s_end_only(
    shape: Profile, end: int
) -> None:
    who, tokens = member(shape), fresh(43, 5)
    picker = picked(who, tokens)
    assert predicted(picker, who, tokens).predicted == end
    assert predicted(picker, who, tokens + fresh(9)).predicted == end
    # In between nothing is kept: a prompt that shares less cannot resume.
    assert predicted(picker, who, tokens[: end - 64] + fresh(9)).predicted == 0


def test_eagle_drops_a_block_of_what_is_predicted_too() -> None:
    who, tokens = member(PLAIN, WorkerOptions(eagle=True)), fresh(10, 4)
    picker = picked(who, tokens)
    assert predicted(picker, who, tokens).reusable == 144
    assert predicted(picker, who, tokens + fresh(2)).reusable == 144


def test_lookahead_names_are_predicted_as_queries_probe_them() -> None:
    shape = profile(("full_attention", 16, 0, "main"), lookahead=1)
    who, tokens = member(shape), fresh(10, 1)
    picker = picked(who, tokens)
    assert predicted(picker, who, tokens).reusable == 160
    other = [*tokens[:160], (tokens[160] + 1) % 1000, *fresh(2)]
    assert predicted(picker, who, other).reusable == 144


def test_events_of_block_keys_confirm_what_was_predicted() -> None:
    who, tokens = member(PLAIN), fresh(4, 1)
    picker = picked(who, tokens)
    keys = chain.prompt_keys(tokens)
    picker.predictions.seen(who.key, keys[:3], [])
    facts = Scored(matched=48, reusable=48, device=48, block_size=16)
    found = picker.with_predictions(query(tokens), [who], [facts], NOW)[0]
    assert (found.matched, found.reusable, found.predicted) == (64, 64, 16)
    assert found.device == 64


def test_registered_block_size_stands_in_until_events_show_it() -> None:
    who, tokens = member(UNKNOWN, block_size=64), fresh(8, 1)
    picker = Picker()
    choice = picker.rank(query(tokens), [who], [Scored()], NOW)[0]
    assert choice.cost == 2
    picker.take("r", choice, query(tokens), NOW, 60)
    assert picker.ledger.load(who.key, NOW).active_blocks == 2


def test_blocks_on_farther_tiers_count_in_part() -> None:
    shape = geometry(PLAIN, WorkerOptions())
    weights = Weights(host=0.7, storage=0.3)
    scored = Scored(160, 160, 64, 48, 48, 16)
    miss = miss_blocks(scored, shape, 165, 16, weights)
    assert miss.weighted == pytest.approx(10 - 4 - 3 * 0.7 - 3 * 0.3)
    assert miss.computed == 0
    # Held to the end, of which the engine computes the last block again: at the last tier's worth.
    scored = Scored(160, 144, 96, 48, 0, 16)
    miss = miss_blocks(scored, shape, 160, 16, weights)
    assert miss.weighted == pytest.approx(10 - 6 - 4 * 0.7)
    assert miss.computed == 0
    scored = Scored(144, 144, 144, 0, 0, 16)
    assert miss_blocks(scored, shape, 160, 16, weights) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "options", "tokens", "most"),
    [
        (PLAIN, WorkerOptions(), 160, 144),
        (PLAIN, WorkerOptions(), 161, 160),
        (PLAIN, WorkerOptions(eagle=True), 161, 144),
        (STATE, WorkerOptions(), 128, 64),
        (STATE, WorkerOptions(), 129, 128),
        (profile(("full_attention", 16, 0, "main"), pairs=True), WorkerOptions(), 161, 144),
        (PLAIN, WorkerOptions(), 0, 0),
    ],
)
def test_no_worker_can_reuse_more_than_the_ceiling(
    shape: Profile, options: WorkerOptions, tokens: int, most: int
) -> None:
    assert ceiling(geometry(shape, options), tokens) == most


def test_state_that_is_missing_at_the_end_is_a_miss_although_attention_holds_it_all() -> None:
    shape = geometry(STATE, WorkerOptions())
    weights = Weights()
    held = Scored(matched=128, reusable=128, device=128, block_size=16)
    assert miss_blocks(held, shape, 129, 16, weights) == (0, 0)
    short = held._replace(reusable=64, device=64)
    assert miss_blocks(short, shape, 129, 16, weights) == (4, 4)
    assert miss_blocks(short, shape, 128, 16, weights) == (0, 0)  # nobody could do better


def test_roles_weigh_what_is_missing() -> None:
    tokens = fresh(3)
    for role, cost in (("PREFILL", 60), ("DECODE", 6), ("MIXED", 3)):
        who = member(PLAIN, role=role)
        scored = [Scored(block_size=16)]
        assert Picker().rank(query(tokens), [who], scored, NOW)[0].cost == cost
        assert Picker().rank(query(tokens), [who], scored, NOW, 0.5)[0].cost == 1.5
