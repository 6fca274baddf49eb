"""Offloaded chunks, helper streams, unknown groups: small streams with one right answer each."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pure import FULL, MAMBA, MLA, WINDOW, A, B, C, D, Rank, chunk, removed, stored

from kvindexd.enginehash import ALGORITHMS, identify
from kvindexd.model import Profile
from kvindexd.residency import Options
from kvindexd.scoring.geometry import WorkerOptions, geometry

E = chunk(5)
HA, HB, HC, HD, HE = 0xA, 0xB, 0xC, 0xD, 0xE
ABCD, H4 = A + B + C + D, [HA, HB, HC, HD]


def offloaded(hashes: list[int], tokens: list[int], parent: Any = None) -> dict[str, Any]:
    return stored(hashes, tokens, parent, medium="CPU")


# -- chunks of several blocks below the device ----------------------------------------------------


def test_a_chunk_is_found_by_its_last_block_alone() -> None:
    """A connector that offloads several blocks at a time lists them all, but another prompt that
    shares only some of them cannot load those."""
    rank = Rank()
    rank.send(stored(H4, ABCD), offloaded(H4, ABCD))
    rank.send(removed(H4))
    assert rank.tiers([*ABCD, 1]) == (0, 64, 0)
    assert rank.tiers([*A, *B, *E]) == (0, 0, 0)
    assert rank.tiers([*A, *B, *C, *E, 1]) == (0, 0, 0)


def test_a_chunk_goes_with_its_last_block() -> None:
    rank = Rank()
    other = [*A, *B, *C, *E]
    rank.send(stored(H4, ABCD), offloaded(H4, ABCD))
    rank.send(stored([HE], E, HC), offloaded([HA, HB, HC, HE], other))
    rank.send(removed(H4), removed([HE]))
    assert rank.tiers([*other, 1]) == (0, 64, 0)
    rank.send(removed(H4, medium="CPU"))
    assert rank.tiers([*ABCD, 1]) == (0, 0, 0)
    assert rank.tiers([*other, 1]) == (0, 64, 0)
    rank.send(removed([HA, HB, HC, HE], medium="CPU"))
    assert rank.tiers([*other, 1]) == (0, 0, 0)


def test_a_chunk_that_comes_before_its_parent_waits_as_one() -> None:
    rank = Rank()
    second = chunk(6, 64)
    rank.send(stored([HA], A))
    rank.send(offloaded([1, 2, 3, 4], second, HD))
    rank.send(offloaded(H4, ABCD))
    assert rank.tiers([*ABCD, *second, 1]) == (16, 112, 0)
    rank.send(removed([HA]))
    assert rank.tiers([*ABCD, *second[:32], 1]) == (0, 64, 0)


def test_no_load_is_smaller_than_a_chunk() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B), offloaded(H4, ABCD))
    assert rank.tiers([*ABCD, 1]) == (32, 0, 0)
    rank.send(offloaded([1, 2, 3, 4], chunk(6, 64), HD))
    assert rank.tiers([*ABCD, *chunk(6, 64), 1]) == (32, 96, 0)


def test_single_blocks_below_the_device_are_loaded_one_by_one() -> None:
    rank = Rank()
    rank.send(stored([HA], A), offloaded([HB], B, HA), offloaded([HC], C, HB))
    assert rank.tiers([*ABCD, 1]) == (16, 32, 0)


def test_pages_without_a_group_are_no_chunk() -> None:
    """SGLang writes whole nodes to the host, and splits them without a word."""
    rank = Rank()
    node = {
        "type": "BlockStored", "block_hashes": H4, "parent_block_hash": None,
        "token_ids": ABCD, "block_size": 16, "lora_id": None,
    }  # fmt: skip
    rank.send(node | {"medium": "GPU"}, node | {"medium": "CPU_PINNED"})
    rank.send({"type": "BlockRemoved", "block_hashes": H4, "medium": "GPU"})
    assert rank.tiers([*A, *B, *E, 1]) == (0, 32, 0)


# -- reuse told again -----------------------------------------------------------------------------


def test_what_is_told_again_from_the_root_is_no_second_copy() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    rank.send(stored([HA, HB], A + B), stored([HC], C, HB))
    rank.send(removed([HB]))
    assert rank.matched(A + B + C) == 1
    rank.send(stored([HB], B, HA))
    assert rank.matched(A + B + C) == 3


def test_a_prompt_computed_anew_for_want_of_a_state_is_a_second_copy() -> None:
    rank = Rank()
    state = {"group": 1, "kind": MAMBA}
    rank.send(stored([HA, HB], A + B), stored([], A + B, **state))
    rank.send(stored([HA, HB], A + B), stored([HB], A + B, **state))
    rank.send(removed([HA]))
    assert rank.reusable([*A, *B, 1]) == 32
    rank.send(stored([HA, HB], A + B), stored([HB], A + B, **state))  # reusable: told again
    rank.send(removed([HA]))
    assert rank.reusable([*A, *B, 1]) == 0
    assert rank.counters["reannounced"] == 3


# -- helpers, and groups whose rules are unknown --------------------------------------------------


def test_a_helper_with_finer_blocks_in_the_same_group_adds_nothing() -> None:
    rank = Rank()
    big = chunk(7, 64)
    rank.send(stored([1], big, bs=64), stored([11, 12, 13, 14], big, bs=16))
    rank.send(stored([15], chunk(8), 1, bs=16))
    assert rank.reusable([*big, *chunk(8), 1]) == 64
    rank.send(removed([1]))
    assert rank.reusable([*big, 1]) == 0


def test_a_helper_group_of_another_size_has_its_say() -> None:
    rank = Rank()
    big = chunk(7, 64)
    rank.send(stored([11, 12, 13, 14], big, kind=FULL))
    rank.send(stored([14], big, group=1, kind=MLA, bs=64))
    assert rank.reusable([*big, 1]) == 64
    rank.send(removed([14], group=1))
    assert rank.reusable([*big, 1]) == 0
    assert rank.matched(big) == 0


@pytest.mark.parametrize(
    ("kind", "unknowable"),
    [("unknown", True), ("brand_new", True), ("cross_attention", False), (WINDOW, False)],
)
def test_a_group_of_unknown_rules_makes_the_answer_an_upper_bound(
    kind: str, unknowable: bool
) -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, group=1, kind=kind, window=16))
    assert rank.geometry().options.hidden_groups is unknowable


def test_attention_only_is_an_upper_bound_where_other_groups_have_a_say() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    assert not geometry(rank.profile, WorkerOptions(), False).options.hidden_groups
    rank.send(stored([HA], A, group=1, kind=MAMBA))
    assert geometry(rank.profile, WorkerOptions(), False).options.hidden_groups
    assert not geometry(rank.profile, WorkerOptions(), True).options.hidden_groups
    assert not geometry(Profile(), WorkerOptions(), False).options.hidden_groups


# -- the engine's own hash ------------------------------------------------------------------------


def test_a_function_under_another_seed_is_known_behind_the_root_alone() -> None:
    sha = ALGORITHMS[0]
    root = hashlib.sha256(b"some other seed").digest()
    packed = b"".join(t.to_bytes(4, "little") for t in A + B)
    first = sha.hash((root, tuple(A), None))
    second = sha.hash((first, tuple(B), None))
    found = identify([first, second], 16, packed, True, [])
    assert found is not None
    assert (found.algorithm.name, found.algorithm.root) == ("sha256", None)
    assert identify([first], 16, packed[:64], True, []) is None
    rank = Rank(Options())
    rank.residency.placer.restore(("sha256?", 16, False), False)
    assert rank.residency.placer.saved() == ("sha256?", 16, False)
