"""Faults that users of KV-cache routers met on the wire and with groups, as event sequences.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from pure import (
    BS,
    FULL,
    HA,
    HB,
    HC,
    HD,
    MAMBA,
    MLA,
    WINDOW,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    legacy,
    removed,
    stored,
)

from kvindexd.groups import Treatment
from kvindexd.residency import Options
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.wire import BlockStored, Rejected, decode_batch

encode = msgspec.msgpack.encode
ARRAY = ["BlockStored", [HA], None, A, 16, None, "GPU", None, None, 0, FULL, None]


def sent(*raw: bytes, rank: Rank | None = None) -> Rank:
    rank = rank or Rank()
    for one in raw:
        rank.send_raw(one)
    return rank


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        encode([1.0, [ARRAY], 0]),
        encode([1.0, [stored([HA], A)], 0]),
        encode({"ts": 1.0, "events": [stored([HA], A)], "data_parallel_rank": 0}),
        encode({"ts": 1.0, "events": [ARRAY], "data_parallel_rank": 0}),
    ],
    ids=["arrays", "maps", "map batch of maps", "map batch of arrays"],
)
def test_field_every_generation_decodes_to_the_same_state(raw: bytes) -> None:
    """W1: events became maps and array decoders dropped everything."""
    rank, plain = sent(raw), sent(encode([1.0, [stored([HA], A)], 0]))
    assert rank.matched(A) == 1
    assert rank.fields == plain.fields


def test_field_generations_mix_inside_one_batch() -> None:
    """W1: decided per event, with no switch."""
    child = stored([HB], B, HA)
    assert sent(encode([1.0, [ARRAY, child], 0])).matched(A + B) == 2


def test_field_shape_decides_and_no_engine_name_is_asked() -> None:
    """W2: a third engine with vLLM's shape fell to the array decoder. Nothing here takes a name."""
    rank = sent(encode([1.0, [stored([HA], A, group=None, kind=None)], 0]))
    assert rank.matched(A) == 1
    rank.send({"type": "BlockStored"}, ["BlockStored"])
    assert rank.counters["dropped:bad_field"] == 2


@pytest.mark.parametrize("tail", [[], [None], [3], [0, "future"]])
def test_field_batches_have_two_or_more_elements(tail: list[Any]) -> None:
    """W3: two or three elements, or more to come."""
    raw = encode([1.0, [ARRAY], *tail])
    assert sent(raw).matched(A) == 1
    assert decode_batch(raw).rank == (tail[0] if tail else None)


def test_field_identity_fields_reach_the_key_or_the_filter() -> None:
    """W4: only the first four fields were read; group, medium and adapter were lost."""
    rank = Rank()
    rank.send(stored([HA], A, group=1, kind=WINDOW), stored([HD], D))
    rank.send(stored([HB], B, medium="CPU"), stored([HC], C, lora_name="x"))
    assert rank.matched(A) == 0
    assert rank.tiers([*B, 1], hybrid=False) == (0, 16, 0)
    assert (rank.matched(C), rank.matched(C, lora="x")) == (0, 1)


@pytest.mark.parametrize(
    ("stored_as", "removed_as"),
    [
        (b"\x01" * 32, b"\x01" * 32),
        (-5, -5),
        (-5, 2**64 - 5),
        (2**64 - 5, -5),
        ("a-text-hash", "a-text-hash"),
        ("a-text-hash", b"a-text-hash"),
    ],
)
def test_field_a_removal_finds_its_store_in_every_form_of_hash(
    stored_as: Any, removed_as: Any
) -> None:
    """W5: int64, uint64, bytes and text, and a parent in the other form."""
    rank = Rank()
    rank.send(stored([stored_as], A), stored([HB], B, removed_as))
    assert rank.matched(A + B) == 2
    rank.send(removed([removed_as]))
    assert rank.matched(A + B) == 0
    assert rank.held() == 1


def test_field_hash_bytes_are_never_cut() -> None:
    """W5: two digests that share their last (or first) eight bytes are two hashes."""
    one, two = b"\x01" * 24 + b"\x07" * 8, b"\x02" * 24 + b"\x07" * 8
    three = b"\x01" * 31 + b"\x00"
    rank = Rank()
    rank.send(stored([one], A), stored([two], B), stored([three], C))
    rank.send(removed([one]))
    assert [rank.matched(t) for t in (A, B, C)] == [0, 1, 1]


def test_field_short_tuples_of_older_engines_are_whole_events() -> None:
    """W7: SGLang omits what it has no value for; a missing medium is the device."""
    rank = Rank()
    rank.send(legacy([HA], A), legacy([HB], B, HA))
    assert rank.matched(A + B) == 2
    rank.send(["BlockRemoved", [HB]])
    assert rank.matched(A + B) == 1
    rank.send(["AllBlocksCleared"])
    assert rank.matched(A) == 0


def pairs(first: int, last: int) -> list[list[int]]:
    """[[t, t + 1], ...] for t in first..last."""
    return [[t, t + 1] for t in range(first, last + 1)]


def test_field_a_pair_block_covers_one_token_more() -> None:
    """W8: speculative decoding sends pairs; every event was rejected, or the overlap always 0."""
    rank = Rank()
    rank.send(legacy([HA], pairs(1, 16)))
    assert rank.matched(range(1, 18)) == 1
    assert rank.matched(range(1, 17)) == 0
    assert rank.matched([*range(1, 17), 99]) == 0
    assert rank.presence.profile.pairs
    rank.send(legacy([HB], pairs(17, 32), HA))
    assert rank.matched(range(1, 34)) == 2
    assert rank.reusable(range(1, 35)) == 32
    assert rank.reusable(range(1, 34)) == 16


def test_field_pair_blocks_and_flat_blocks_of_the_same_tokens_do_not_mix() -> None:
    """W8: a worker that publishes pairs is not matched by the flat name of the same tokens."""
    paired, flat = Rank(), Rank()
    paired.send(legacy([HA], pairs(1, 16)))
    flat.send(legacy([HA], range(1, 17)))
    names = [{n for held in r.presence.names.values() for n in held} for r in (paired, flat)]
    assert not names[0] & names[1]


def test_field_more_hashes_than_blocks_reject_the_event() -> None:
    """W10: four hashes, three tokens, block size 256: an error with a trace per event."""
    rank = Rank()
    rank.send(stored([1, 2, 3, 4], [1, 2, 3], bs=256), stored([HA], A))
    assert rank.counters["dropped:misaligned"] + rank.counters["dropped:too_many_hashes"] == 1
    assert rank.held() == 1


def test_field_a_bad_event_costs_itself_and_block_size_has_no_default() -> None:
    """W11: an exception, a reconnect, the same event again, for ever; a missing size became 1."""
    sparse = stored([1], range(3840), bs=768)
    rank = Rank()
    rank.send(sparse, stored([2], A, bs=0), stored([3], A, bs=None), stored([HA], A))
    assert rank.counters["dropped:bad_block_size"] == 2
    assert rank.counters["sparse"] == 1
    assert rank.residency.unit == 16
    assert {slot.size for slot in rank.residency.holdings.slots} == {16, 768}
    assert rank.matched(A, hybrid=False) >= 0
    rank.send(stored([HB], B, HA))
    assert HB in rank.residency.holdings.blocks


def test_field_unknown_tags_cost_themselves_and_are_counted_by_name() -> None:
    """W13: new tags and fields are being proposed; one must not cost its batch."""
    rank = Rank()
    rank.send(
        stored([HA], A, event_version=2),
        {"type": "TierBlocksCleared", "medium": "GPU"},
        {"type": "BlockTransferred", "to": "CPU"},
        {"type": 5},
        stored([HB], B, HA),
    )
    assert rank.matched(A + B) == 2
    assert rank.counters["dropped:unknown_tag"] == 3
    assert rank.counters["tag:TierBlocksCleared"] == 1
    assert rank.counters["tag:BlockTransferred"] == 1


# -- groups and block sizes -----------------------------------------------------------------------


def test_field_a_sparse_event_of_a_main_group_binds_nothing() -> None:
    """H2: one hash, several chunks of tokens, position unknown; with a kind and without."""
    for more in ({}, {"group": None, "kind": None}):
        rank = Rank()
        rank.send(stored([HC], C, **more))
        rank.send(stored([HB], A + B, **more))
        assert rank.matched(A + B) == 2
        assert rank.matched(C) == 1
        assert rank.counters["sparse"] == 1
        rank.send(stored([HD], D, HB, **more))
        assert rank.counters["orphans"] == 1
        assert rank.matched(A + B + D) == 2


def test_field_a_sparse_event_of_another_group_only_adds_its_own_bit() -> None:
    """H2: presence joined through the hash map; earlier evidence stays as it was."""
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    before = dict(rank.fields)
    rank.send(stored([HB], A + B, group=1, kind=MAMBA))
    assert rank.matched(A + B) == 2
    assert rank.reusable(A + B + C) == 32
    assert set(rank.fields) == set(before)


def test_field_five_groups_of_four_block_sizes() -> None:
    """H4: window groups list only resident blocks; reuse was 24.7% instead of about 76%."""
    tokens = list(range(256))
    rank = Rank()
    rank.send(
        stored([2], tokens, group=1, kind="sliding_window_mla", bs=64, window=128),
        stored([2], tokens, group=2, kind="sliding_window_mla", bs=64, window=128),
        stored([2], tokens, group=3, kind="sliding_window_mla", bs=4, window=8),
        stored([2], tokens, group=4, kind="sliding_window_mla", bs=8, window=16),
        stored([2], tokens, group=0, kind=MLA, bs=256),
    )
    assert rank.matched(tokens) == 1
    assert rank.held() == 1
    assert rank.residency.catalogue.groups[0].treated_as is Treatment.MAIN
    assert rank.reusable([*tokens, 1], hybrid=False) == 256


def test_field_a_removal_from_a_state_group_leaves_the_attention_block() -> None:
    """H5 (i): removes carry a group and no kind."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HA], A, group=0, kind=MAMBA))
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 1


def test_field_the_groups_survive_a_restart_of_kvindexd() -> None:
    """H5 (ii): the map is saved with the index; a group nobody knows takes nothing away."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HB], B, HA, group=3, kind=MLA))
    again = rank.reloaded()
    again.send(removed([HB], group=3))
    assert again.matched(A + B) == 1
    again.send(removed([HA], group=7))
    assert again.matched(A + B) == 1
    assert again.counters["unknown_group"] == 1


def test_field_another_layout_after_an_engine_restart() -> None:
    """H5 (iii): group 0 was Mamba and is now attention."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HA], A, group=0, kind=MAMBA))
    rank.restart_engine()
    rank.send(stored([HA], A, group=0))
    assert rank.matched(A) == 1
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 0


@pytest.mark.parametrize("kind", ["unknown", "some_new_kind"])
def test_field_unknown_kinds_are_left_out_loudly_and_can_be_taken_in(kind: str) -> None:
    """H6: a merged group reported `unknown`, and filters dropped all its events."""
    rank = Rank()
    rank.send(stored([HA], A, kind=kind), stored([HB], B, HA, kind=kind))
    assert rank.matched(A + B) == 0
    assert rank.counters[f"filtered:{kind}"] == 2
    assert rank.counters["admitted"] == 0
    assert [g.stores for g in rank.residency.catalogue.infos()] == [2]
    told = Rank(Options(treat_as={kind: "main"}))
    told.send(stored([HA], A, kind=kind), stored([HB], B, HA, kind=kind))
    assert told.matched(A + B) == 2


@pytest.mark.parametrize("size", [528, 768, 1056, 2096])
def test_field_block_size_is_learned_from_the_first_admitted_store(size: int) -> None:
    """H8: configured 16, engine 528/768/1056/2096: every event dropped, with only a warning."""
    rank = Rank()
    rank.send(stored([1], [7] * (size * 2), group=1, kind="cross_attention", bs=size * 2))
    rank.send(stored([HA], range(size), bs=size))
    assert rank.matched(range(size)) == 1
    assert rank.geometry().block_size == size
    assert rank.reusable(range(size + 1)) == size


def test_field_a_window_group_that_frees_blocks_leaves_the_prefix_whole() -> None:
    """H9: groups folded together punch holes into the full-attention prefix."""
    names, tokens = list(range(1, 9)), [t for n in range(8) for t in chunk(n)]
    rank = Rank()
    rank.send(stored(names, tokens), stored(names, tokens, group=1, kind=WINDOW, window=32))
    rank.send(removed(names[:4], group=1))
    assert rank.matched(tokens) == 8
    rank.send(removed(names[:4]))
    assert rank.matched(tokens) == 0


def test_field_reuse_is_the_largest_boundary_of_all_groups() -> None:
    """H10: an attention-only index over-credits; nor is it the least of the groups' maxima."""
    names, tokens = list(range(1, 11)), [t for n in range(10) for t in chunk(n)]
    rank = Rank()
    rank.send(stored(names, tokens))
    rank.send(stored([5, 8], tokens, group=1, kind=MAMBA))
    rank.send(stored(names, tokens, group=2, kind=WINDOW, window=17))
    rank.send(removed([8], group=2))
    assert rank.matched([*tokens, 1]) == 10
    assert rank.reusable([*tokens, 1]) == 5 * BS
    limits = [int(n[0]) for n in rank.ask([*tokens, 1]).limits]
    assert limits == [160, 128, 160]


@pytest.mark.parametrize("length", [0, 10, 2095])
def test_field_a_prompt_shorter_than_a_block_scores_zero(length: int) -> None:
    """H11: no event, no error."""
    rank = Rank()
    rank.send(stored([HA], range(2096), bs=2096))
    found = rank.ask(range(length))
    assert (int(found.matched[0]), int(found.reusable[0])) == (0, 0)


def test_field_matched_is_resident_and_only_an_option_subtracts() -> None:
    """H13: EAGLE drops the last matched block. `matched` says what is held; `reusable` drops a
    block only where the operator says `eagle`."""
    tokens = list(range(3 * 2096))
    for eagle, reusable in ((False, 2 * 2096), (True, 2096)):
        rank = Rank(worker=WorkerOptions(eagle=eagle))
        rank.send(stored([1, 2, 3], tokens, bs=2096))
        assert rank.matched(tokens) == 3
        assert rank.reusable(tokens) == reusable


def test_field_engines_without_group_fields_are_indexed() -> None:
    """H14: no metadata at all is one legacy group; group 0 without a kind is provisional; a
    further group without a kind could be anything."""
    rank = Rank()
    rank.send(stored([HA], A, group=None, kind=None))
    assert rank.matched(A) == 1
    rank = Rank()
    rank.send(stored([HB], B, group=0, kind=None), stored([HC], C, group=1, kind=None))
    assert (rank.matched(B), rank.matched(C)) == (1, 0)
    rank.send(stored([HC], C, HB, group=0, kind=FULL))
    assert rank.matched(B + C) == 2
    assert rank.counters["filtered:unknown"] == 1


def test_field_kindless_events_mix_with_events_that_have_one() -> None:
    """H14: a connector that leaves the group out speaks of the main group's blocks."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], B, HA))
    rank.send(stored([HB], [], None, group=None, kind=None, medium="CPU"))
    rank.send(removed([HB]))
    assert rank.tiers(A + B + C) == (16, 16, 0)
    rank.send(removed([HB], group=None, medium="CPU"))
    assert rank.tiers(A + B + C) == (16, 0, 0)


# -- hostile load ---------------------------------------------------------------------------------


def test_field_rejected_events_carry_no_tokens_and_no_trace() -> None:
    """W10, W11: what is kept of a bad event is its reason and one line."""
    raw = encode([1.0, [stored([HA], [2**33] * 16), stored([HB], B)], 0])
    bad, good = decode_batch(raw).events
    assert isinstance(bad, Rejected)
    assert isinstance(good, BlockStored)
    assert str(2**33) not in bad.detail
    assert len(bad.detail) < 200


def test_field_a_thousand_clears_cost_next_to_nothing() -> None:
    """G14: a clear is paid for by what is held; the second one is free."""
    rank = Rank()
    names = list(range(1, 10_001))
    rank.send(stored(names, [t % 50_000 for t in range(160_000)]))
    rank.send({"type": "AllBlocksCleared"})
    start = time.perf_counter()
    for _ in range(10):
        delta = rank.send(*[{"type": "AllBlocksCleared"}] * 100)
        assert not delta.blocks
        assert not delta.mutations
    assert time.perf_counter() - start < 1.0
