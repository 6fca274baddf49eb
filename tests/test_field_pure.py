"""Faults that users of KV-cache routers met with chains, restarts and identities.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

from typing import Any

import pytest
from pure import (
    CLEARED,
    HA,
    HB,
    HC,
    HD,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    payload,
    removed,
    stored,
)

from kvindexd.ingest.actions import Apply, Restarted, SequencerConfig
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.sequencer import Sequencer
from kvindexd.residency import Options

# -- parents and order ----------------------------------------------------------------------------


def test_field_orphans_are_linked_when_their_parent_is_announced_again() -> None:
    """P1: after a loss the children of unknown parents were dropped, and theirs, for ever."""
    rank = Rank()
    rank.send(stored([HC], C, HB), stored([HD], D, HC))
    assert rank.matched(A + B + C + D) == 0
    assert rank.counters["orphans"] == 2
    rank.send(stored([HA, HB], A + B))
    assert rank.matched(A + B + C + D) == 4


def test_field_an_unknown_parent_is_not_the_root() -> None:
    """P2: re-rooted orphans never match, or match the wrong prompt."""
    rank = Rank()
    rank.send(stored([HC], C, HB))
    assert rank.matched(C) == 0
    assert rank.matched(A + B + C) == 0
    rank.send(stored([HD], D))
    assert rank.matched(D) == 1


def test_field_a_partial_block_of_an_unannounced_parent_stays_parked() -> None:
    """P3: it must not be attached to the nearest ancestor, and the room is bounded."""
    tokens = list(range(1792))
    rank = Rank(Options(parked=50))
    rank.send(stored([1536], tokens[:1536], bs=1536))
    for i in range(200):
        rank.send(stored([20_000 + i], tokens[1664:1792], 10_000 + i, bs=128))
    assert rank.matched(tokens) == 1
    assert int(rank.ask(tokens).matched[0]) == 1536
    assert rank.counters["orphans"] == 200
    assert len(rank.residency.waiting) == 50
    assert len(rank.parked) <= 102


def test_field_a_block_that_is_its_own_parent_is_rejected_alone() -> None:
    """P5: an indexer crashed and every request failed."""
    rank = Rank()
    rank.send(stored([HC], C))
    rank.send(stored([HA], A, HA), stored([HA, HA], A + B), stored([HB], B))
    assert rank.counters["dropped:cycle"] == 2
    assert [rank.matched(t) for t in (A, B, C)] == [0, 1, 1]


def test_field_a_middle_block_removed_and_stored_again() -> None:
    """P7: children neither vanish nor need to be announced again, and counts do not drift."""
    rank = Rank()
    rank.send(stored([HA, HB, HC], A + B + C))
    for _ in range(1000):
        rank.send(removed([HB]))
        assert rank.matched(A + B + C) == 1
        rank.send(stored([HB], B, HA))
        assert rank.matched(A + B + C) == 3
        assert rank.held() == 3
    assert len(rank.fields) == 3


def test_field_a_decode_worker_is_not_credited_for_what_was_transferred_to_it() -> None:
    """P8: transferred blocks are not announced; their children are orphans on that worker."""
    prefill, decode = Rank(), Rank()
    prefill.send(stored([HA, HB], A + B))
    decode.send(stored([HC], C, HB))
    assert prefill.matched(A + B + C) == 2
    assert decode.matched(A + B + C) == 0
    assert decode.counters["orphans"] == 1


def test_field_a_removal_goes_on_behind_a_hash_that_is_absent() -> None:
    """P10: one absent hash aborted the rest."""
    rank, other = Rank(), Rank()
    for r in (rank, other):
        r.send(stored([HA, HB, HC], A + B + C))
    rank.send(removed([HA, 0xDEAD, HB]))
    assert rank.matched(A + B + C) == 0
    assert rank.held() == 1
    assert rank.residency.holdings.blocks[HC].copies
    assert rank.counters["unknown_removes"] == 1
    rank.send(removed([HA, 0xDEAD, HB]))
    assert rank.held() == 1
    assert other.matched(A + B + C) == 3


def test_field_equal_numbers_on_two_workers_mean_nothing_to_each_other() -> None:
    """P11: root seeds were random per process."""
    one, two = Rank(), Rank()
    one.send(stored([1], A))
    two.send(stored([9], A))
    assert (one.matched(A), two.matched(A)) == (1, 1)
    two.send(stored([1], B))
    one.send(removed([1]))
    assert (one.matched(A), two.matched(A), two.matched(B)) == (0, 1, 1)
    two.restart_engine()
    two.send(stored([9], B))
    assert (two.matched(A), two.matched(B)) == (0, 1)


# -- restarts, clears, bounds ---------------------------------------------------------------------


class Stream:
    """Numbered batches through the sequencer, as ingest does it, without sockets."""

    def __init__(self, *, replay: bool = False) -> None:
        self.rank = Rank()
        self.sequencer = Sequencer(SequencerConfig(replay=replay))
        self.restarts = 0
        self.clock = 100.0

    def publish(self, seq: int, *events: Any) -> None:
        self.clock += 1.0
        raw = payload(*events, ts=self.clock)
        for action in self.sequencer.live(Frame.of(b"", seq, raw, 0.0), 0.0):
            if isinstance(action, Restarted):
                self.rank.restart_engine()
                self.restarts += 1
            elif isinstance(action, Apply):
                self.rank.send_raw(action.frame.payload)


def test_field_a_sequence_that_starts_again_is_a_new_incarnation() -> None:
    """G9: ignored where replay is off, which is the default."""
    stream = Stream()
    stream.publish(0, stored([HA], A))
    for seq in range(1, 6):
        stream.publish(seq, stored([100 + seq], chunk(100 + seq)))
    stream.publish(0, stored([HD], D))
    assert stream.restarts == 1
    assert (stream.rank.matched(A), stream.rank.matched(D)) == (0, 1)
    stream.publish(1, stored([HA], A))
    assert stream.rank.matched(A) == 1
    assert stream.restarts == 1


def test_field_ranks_have_cursors_of_their_own() -> None:
    """I1: one tracker for all ranks saw false gaps and resets."""
    ranks = [Stream(), Stream()]
    for seq, rank in [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1)]:
        ranks[rank].publish(seq, stored([10 * rank + seq], chunk(10 * rank + seq)))
    assert [s.restarts for s in ranks] == [0, 0]
    assert [s.sequencer.last_seq for s in ranks] == [2, 1]
    assert [s.rank.held() for s in ranks] == [3, 2]


def test_field_data_belongs_to_the_stream_that_it_came_from() -> None:
    """I2, I3: a batch's own rank number neither moves nor merges data."""
    one, two = Rank(), Rank()
    one.send_raw(payload(stored([HA], A), rank=3))
    two.send_raw(payload(stored([HB], B), rank=3))
    assert (one.matched(A), one.matched(B)) == (1, 0)
    assert (two.matched(A), two.matched(B)) == (0, 1)


def test_field_a_clear_takes_one_workers_blocks() -> None:
    """G13: decoded and ignored elsewhere."""
    one, other = Rank(), Rank()
    for rank in (one, other):
        rank.send(stored([HA, HB], A + B))
    one.send(CLEARED)
    assert (one.matched(A + B), other.matched(A + B)) == (0, 2)
    one.send(stored([HA], A))
    assert one.matched(A + B) == 1
    one.send(removed([HA]))
    assert one.matched(A + B) == 0
    assert "unknown_group" not in one.counters


def test_field_claims_of_a_producer_that_never_removes_are_bounded() -> None:
    """G15, G16: some producers never send the remove, and some removes are lost before they are
    numbered. Only a bound heals that: the oldest unconfirmed claims expire, and are counted."""
    rank = Rank(Options(blocks=1000))
    for i in range(0, 10_000, 50):
        names = list(range(20_000 + i, 20_050 + i))
        rank.send(*(stored([n], chunk(n)) for n in names), stored([HA], A))
        assert rank.held() <= 1000
    assert rank.counters["claims_expired"] >= 9000
    assert rank.matched(A) == 1
    assert rank.matched(chunk(29_999)) == 1
    assert rank.matched(chunk(20_000)) == 0
    rank.send(stored([20_000], chunk(20_000)))
    assert rank.matched(chunk(20_000)) == 1


# -- adapters, salts, items -----------------------------------------------------------------------


def test_field_adapters_and_the_base_model_do_not_collide() -> None:
    """I9: numeric ids depend on the load order and count for nothing where a name is."""
    base, x, y = Rank(), Rank(), Rank()
    base.send(stored([1], A))
    x.send(stored([2], A, lora_name="x", lora_id=1))
    y.send(stored([3], A, lora_name="y", lora_id=1))
    assert [r.matched(A) for r in (base, x, y)] == [1, 0, 0]
    assert [r.matched(A, lora="x") for r in (base, x, y)] == [0, 1, 0]
    again = Rank()
    again.send(stored([2], A, lora_name="x", lora_id=7))
    assert again.matched(A, lora="x") == 1


def test_field_an_adapters_child_inherits_it() -> None:
    """I9: a child event may leave the name out."""
    rank = Rank()
    rank.send(stored([1], A, lora_name="x", lora_id=1), stored([2], B, 1))
    assert rank.matched(A + B, lora="x") == 2
    assert rank.matched(A + B) == 0


def test_field_an_adapter_known_by_number_alone_is_reached_by_nobody() -> None:
    """I9: a number without a name keeps its blocks apart from everything."""
    rank = Rank()
    rank.send(stored([1], A, lora_id=1))
    assert rank.matched(A) == 0
    assert rank.held() == 1


def test_field_a_salt_isolates() -> None:
    """I10: it sits on the first block only, goes on through the chain, and "" is no salt."""
    rank = Rank()
    rank.send(stored([1, 2], A + B, extra_keys=[["tenantA"], None]))
    rank.send(stored([3], C, 2))
    asked = [rank.matched(A + B + C, salt=s) for s in ("", "tenantA", "tenantB")]
    assert asked == [0, 3, 0]
    assert b"tenantA" not in b"".join([*rank.fields, *rank.fields.values(), rank.state or b""])


def test_field_a_salt_in_a_field_of_its_own() -> None:
    """I10: SGLang's form."""
    rank = Rank()
    rank.send(
        {
            "type": "BlockStored",
            "block_hashes": [5],
            "parent_block_hash": None,
            "token_ids": A,
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "cache_salt": "s",
        }
    )
    assert [rank.matched(A, salt=s) for s in ("", "s", "t")] == [0, 1, 0]


def test_field_equal_placeholders_of_other_images_do_not_match() -> None:
    """I12: placeholder tokens are the same for all images."""
    tokens = A + [151_655] * 16 + C
    rank = Rank()
    rank.send(stored([1, 2, 3], tokens, extra_keys=[None, ["img1"], None]))
    assert rank.matched(tokens, items=[("img2", 16)]) == 1
    assert rank.matched(tokens, items=[("img1", 16)]) == 3
    assert rank.matched(tokens) == 1


@pytest.mark.parametrize(
    ("entry", "asks"),
    [
        (None, {}),
        ([["id", 3]], {"items": [("id", 3)]}),
        (["adapterX"], {"lora": "adapterX"}),
        (
            ["adapterX", ["id", 3], "salt"],
            {"lora": "adapterX", "salt": "salt", "items": [("id", 3)]},
        ),
        (["salt"], {"salt": "salt"}),
    ],
)
def test_field_extra_keys_of_every_kind_reach_the_key(entry: Any, asks: dict[str, Any]) -> None:
    """I13: a plain id, a pair, an adapter's name, a salt, all mixed in one list."""
    lora = asks.get("lora")
    event = stored([1], A, extra_keys=[entry])
    event["lora_name"] = lora
    rank = Rank()
    rank.send(event)
    assert rank.matched(A, **asks) == 1
    assert rank.matched(A) == (1 if entry is None else 0)


def test_field_extra_keys_must_be_one_per_hash() -> None:
    """I13: a list of another length rejects the event."""
    rank = Rank()
    rank.send(stored([1, 2], A + B, extra_keys=[["id"]]), stored([HC], C))
    assert rank.counters["dropped:bad_extra_keys"] == 1
    assert rank.held() == 1


@pytest.mark.parametrize(
    "entries", [[b"digest"], [{"type": "new", "v": 1}], [5], [["id", 1, 2]], [[["deep"]]]]
)
def test_field_unknown_extra_keys_separate_and_never_merge(entries: list[Any]) -> None:
    """I13: what is not understood is folded in as it is."""
    rank = Rank()
    rank.send(stored([1], A, extra_keys=[entries]), stored([2], A, extra_keys=[[b"other"]]))
    assert rank.matched(A) == 0
    assert rank.held() == 2


def test_field_models_are_told_apart_by_their_streams() -> None:
    """I14: a remove names no model; each stream is one worker's, registered with its model."""
    one, two = Rank(), Rank()
    for rank in (one, two):
        rank.send(stored([HA], A))
    one.send(removed([HA]))
    assert (one.matched(A), two.matched(A)) == (0, 1)
