"""Where prompts go: the cases with one right answer, and policies that must get them wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from fleet_sim import DEGENERATE, SIZE, Fleet, fresh, prompt

from kvindexd.scoring.cost import Weights
from kvindexd.scoring.pick import Policy
from kvindexd.scoring.picker import PickSettings

Suite = Callable[[type[Policy]], None]


def busy(fleet: Fleet, name: str, blocks: int) -> str:
    """Put one request of so many blocks on a worker that holds them already; its id."""
    tokens = fresh(blocks)
    fleet.hold(name, tokens, blocks)
    fleet.pick(tokens, [name])
    return fleet.last


def holder_gets_them_all(policy: type[Policy]) -> None:
    """A prompt that one worker holds entirely goes 20 of 20 to it, whatever the order."""
    for blocks, extra in ((1, 0), (10, 0), (10, 7), (40, 1)):
        for holder in ("a", "c"):
            for names in (["a", "b", "c"], ["c", "b", "a"]):
                fleet = Fleet(names, policy, caching=False)
                tokens = fresh(blocks, extra)
                fleet.hold(holder, tokens, blocks)
                for _ in range(20):
                    fleet.now += 0.001
                    assert fleet.pick(tokens, names) == holder
    # ... unless it is busier than the prompt is worth.
    fleet = Fleet(["a", "b"], policy)
    tokens = fresh(10)
    fleet.hold("b", tokens, 10)
    busy(fleet, "b", 11)
    assert fleet.pick(tokens) == "a"


def disjoint_prefixes_sort_themselves(policy: type[Policy]) -> None:
    """Two families of prompts end up on a worker each: by content, not by turns."""
    for order in ("pq" * 10, "qp" * 10, "pqqp" * 5):
        fleet = Fleet(["a", "b"], policy)
        prefixes = {"p": fresh(20), "q": fresh(20)}
        went: dict[str, Counter[str]] = {"p": Counter(), "q": Counter()}
        for family in order:
            went[family][fleet.pick(prefixes[family] + fresh(1))] += 1
            fleet.now += 0.05
        assert sorted(sum(went.values(), Counter()).values()) == [10, 10]
        assert len(went["p"]) == len(went["q"]) == 1
    # The first of a family goes where less is being done, not to whose turn it is.
    fleet = Fleet(["a", "b"], policy)
    fleet.pick(fresh(30), ["a"])
    fleet.pick(fresh(1), ["b"])
    assert fleet.pick(fresh(20)) == "b"


def longer_match_wins(policy: type[Policy]) -> None:
    """A strict subset loses, down to a single block of difference."""
    for a, b in ((2, 8), (8, 2), (0, 1), (9, 10)):
        for extra in (0, 5):
            for names in (["a", "b"], ["b", "a"]):
                fleet = Fleet(names, policy, caching=False)
                tokens = fresh(10, extra)
                fleet.hold("a", tokens, a)
                fleet.hold("b", tokens, b)
                assert fleet.pick(tokens, names) == ("a" if a > b else "b"), (a, b, extra)
    for loaded, other in ("ab", "ba"):
        fleet = Fleet(["a", "b"], policy, caching=False)
        tokens = fresh(10)
        fleet.hold("a", tokens, 5)
        fleet.hold("b", tokens, 5)
        busy(fleet, loaded, 1)
        fleet.complete(busy(fleet, other, 1))  # whose turn it is says the opposite
        assert fleet.pick(tokens) == other


def cold_fleet_spreads(policy: type[Policy]) -> None:
    """Work is spread evenly over workers that hold nothing, and what it leaves is used."""
    names = ["a", "b", "c", "d"]
    fleet = Fleet(names, policy)
    blocks: Counter[str] = Counter()
    went = []
    for i in range(80):
        size = 60 if i % 4 == 0 else 1
        tokens = fresh(size)
        name = fleet.pick(tokens)
        blocks[name] += size
        went.append((tokens, name, fleet.last))
    assert set(blocks) == set(names)
    assert max(blocks.values()) <= 1.25 * min(blocks.values())
    for _, _, request in went:
        fleet.complete(request)
    fleet.now += 60
    for tokens, name, _ in went:
        assert fleet.pick(tokens, done=True) == name


def cached_and_in_flight_are_worth_the_same(policy: type[Policy]) -> None:
    """At weight 1 one cached block makes up for one in flight, until that is completed."""
    for n in (1, 3):
        fleet = Fleet(["a", "b"], policy, caching=False)
        tokens = fresh(10)
        fleet.hold("a", tokens, n)
        assert fleet.cost("a", tokens) == fleet.cost("b", tokens) - n
        request = busy(fleet, "a", n)
        assert fleet.cost("a", tokens) == fleet.cost("b", tokens)
        assert fleet.ranked(tokens)[0].member.key.worker_id == "b"
        more = busy(fleet, "a", 1)
        assert fleet.cost("a", tokens) == fleet.cost("b", tokens) + 1
        fleet.complete(more)
        fleet.complete(request)
        assert fleet.cost("a", tokens) == fleet.cost("b", tokens) - n
        for names in (["a", "b"], ["b", "a"]):
            assert fleet.ranked(tokens, names)[0].member.key.worker_id == "a"


SUITES: list[Suite] = [
    holder_gets_them_all,
    disjoint_prefixes_sort_themselves,
    longer_match_wins,
    cold_fleet_spreads,
    cached_and_in_flight_are_worth_the_same,
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.__name__)
def test_exactness(suite: Suite) -> None:
    suite(Policy)


@pytest.mark.parametrize("policy", DEGENERATE, ids=lambda p: p.__name__)
@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.__name__)
def test_degenerate_policies_fail(suite: Suite, policy: type[Policy]) -> None:
    with pytest.raises(AssertionError):
        suite(policy)


# -- spreading --------------------------------------------------------------------------------


def split(fleet: Fleet, make: Callable[[int], list[int]], step: float) -> float:
    """The larger worker's part of 400 requests that follow each other."""
    for i in range(400):
        fleet.pick(make(i), done=True)
        fleet.now += step
    return max(fleet.sent.values()) / 400


KINDS: dict[str, Callable[[int], list[int]]] = {
    "distinct": lambda _: fresh(10, 3),
    "mixed lengths": lambda i: fresh(1 + i * 7 % 40),
    "shorter than a block": lambda _: fresh(0, 5),
    "equal and shorter than a block": lambda _: prompt(0, 1, 5),
    "held by both": lambda _: prompt(10, 1),
}


def spread(policy: type[Policy], weight: float, kind: str, step: float) -> float:
    fleet = Fleet(["a", "b"], policy)
    fleet.weight = weight
    for name in fleet.names:
        fleet.hold(name, prompt(10, 1), 10)
    return split(fleet, KINDS[kind], step)


@pytest.mark.parametrize("step", [0.0, 0.005, 2.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.01, 1.0, 20.0])
def test_serial_traffic_spreads_over_symmetric_workers(
    weight: float, kind: str, step: float
) -> None:
    assert spread(Policy, weight, kind, step) <= 0.6


def test_serial_traffic_does_not_spread_without_a_policy() -> None:
    assert spread(DEGENERATE[0], 1.0, "distinct", 0.005) > 0.6


# -- bursts -----------------------------------------------------------------------------------


def burst(ttl: float, weight: float, make: Callable[[int], list[int]]) -> list[str]:
    """Where 64 requests within 64 ms go among 4 workers, events being 200 ms late."""
    fleet = Fleet("abcd", delay=0.2, settings=PickSettings(prediction_ttl=ttl))
    fleet.weight = weight
    went = []
    for i in range(64):
        went.append(fleet.pick(make(i)))
        fleet.now += 0.001
    return went


def split_of(went: list[str]) -> list[int]:
    return sorted(Counter(went).values(), reverse=True)


def together(went: list[str]) -> int:
    """How many went to one worker before the first went elsewhere."""
    return next((i for i, name in enumerate(went) if name != went[0]), len(went))


def test_burst_of_equal_prompts_stays_together_by_prediction() -> None:
    same = fresh(50)
    assert split_of(burst(2.0, 1.0, lambda _: same)) == [64]
    assert split_of(burst(0.0, 1.0, lambda _: same)) == [16, 16, 16, 16]
    # Locality is not worth it where a block to compute costs less than one in flight.
    assert split_of(burst(2.0, 0.5, lambda _: same)) == [16, 16, 16, 16]


def test_burst_spills_over_when_the_load_is_worth_more_than_the_prefix() -> None:
    prefix = fresh(50)
    runs = {w: together(burst(2.0, w, lambda _: prefix + fresh(4))) for w in (1.0, 2.0, 4.0)}
    # The k-th costs 4w + 50 + 4k where the first ones are, and 54w on an idle worker.
    assert runs == {1.0: 1, 2.0: 13, 4.0: 38}
    assert together(burst(0.0, 4.0, lambda _: prefix + fresh(4))) == 1


def test_prediction_says_what_it_is_and_ends_with_events_or_time() -> None:
    fleet = Fleet(["a", "b"], delay=0.2)
    tokens = fresh(10, 4)
    assert fleet.pick(tokens) == "a"
    first = fleet.ranked(tokens)[0]
    assert (first.scored.reusable, first.scored.predicted) == (160, 160)
    assert first.load.active_blocks == 10
    fleet.now += 0.2
    first = fleet.ranked(tokens)[0]
    assert (first.scored.reusable, first.scored.predicted) == (160, 0)
    assert len(fleet.picker.predictions) == 0
    other = fresh(10, 4)
    fleet._caching = False
    name = fleet.pick(other)
    fleet.now += 1.9
    assert fleet.ranked(other)[0].scored.predicted == 160
    fleet.now += 0.2
    assert [c.scored.predicted for c in fleet.ranked(other)] == [0, 0]
    assert name in fleet.names


# -- weights and tiers ------------------------------------------------------------------------


def test_role_weights_apply_unless_the_request_brings_its_own() -> None:
    weights = Weights()
    assert [weights.of(r) for r in ("PREFILL", "DECODE", "MIXED")] == [20, 2, 1]
    assert Weights(overlap=0.5).of("PREFILL") == 10
    fleet = Fleet(["a", "b"])
    fleet.weight = 7.0
    assert fleet.cost("a", fresh(10)) == 70


def test_ties_go_to_lower_load_then_least_recently_picked_then_by_name() -> None:
    fleet = Fleet(["c", "b", "a"], caching=False)
    tokens = fresh(4)
    assert fleet.ranked(tokens)[0].member.key.worker_id == "a"
    order = []
    for _ in range(6):
        order.append(fleet.pick(tokens, done=True))
        fleet.now += 1000
    assert order == ["a", "b", "c", "a", "b", "c"]
    assert SIZE == 16
