"""A hybrid model's prefill chunks (block 768: three Mamba groups and one MLA group), as recorded.

The engine puts no group into a block's hash, so a Mamba block's hash equals the attention block's
of the same prefix. An index that takes each group's event for a block of its own, or lets a sparse
event bind, answers zero or too much. The last tests switch the filter off and must see that.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from pure import MLA, Rank, presence_by_plane, removed

from kvindexd import enginehash
from kvindexd.chain import pack_tokens
from kvindexd.residency import Options

RECORDED = Path(__file__).parent / "data" / "captures" / "c_kimi768_dense"
BS = 768
SPAN = 5 * BS


def recorded_chunk() -> list[dict[str, Any]]:
    """The four events of the recording's first chunk: groups 0 to 2 Mamba, group 3 MLA."""
    with (RECORDED / "frames.jsonl").open() as f:
        frame = json.loads(f.readline())
    events = msgspec.msgpack.decode(base64.b64decode(frame["payload"]))[1]
    assert [e["kv_cache_spec_kind"] for e in events] == ["mamba"] * 3 + [MLA]
    assert [len(e["block_hashes"]) for e in events] == [1, 1, 1, 5]
    return list(events)


X = recorded_chunk()
X_TOKENS: list[int] = X[3]["token_ids"]
Y_TOKENS = [200_000 + i for i in range(SPAN)]
OTHER = [400_000 + i for i in range(SPAN)]


def next_chunk(hashes: list[int]) -> list[dict[str, Any]]:
    """The chunk behind the recorded one, in its own shape, with these hashes."""
    parent = X[3]["block_hashes"][-1]
    return [
        event
        | {
            "block_hashes": hashes if event["group_idx"] == 3 else hashes[-1:],
            "parent_block_hash": parent,
            "token_ids": Y_TOKENS,
            "extra_keys": None,
        }
        for event in X
    ]


def engine_hashes() -> list[int]:
    """What the recorded engine would call the second chunk's blocks."""
    verified = enginehash.identify(
        X[3]["block_hashes"], BS, pack_tokens(X_TOKENS), at_root=True, sizes=[]
    )
    assert verified is not None
    root = verified.algorithm.root
    assert root is not None
    digests = verified.chain(root, pack_tokens(X_TOKENS + Y_TOKENS))
    names = [verified.announced(d) for d in digests]
    assert names[:5] == X[3]["block_hashes"]
    return [n for n in names[5:] if isinstance(n, int)]


OPAQUE = [7001, 7002, 7003, 7004, 7005]
HASHES = {"reproducible": engine_hashes(), "opaque": OPAQUE}


def ordered(events: list[dict[str, Any]], *, attention_first: bool) -> list[dict[str, Any]]:
    return sorted(events, key=lambda e: (e["group_idx"] != 3) is attention_first)


def played(hashes: list[int], *, attention_first: bool, options: Options | None = None) -> Rank:
    rank = Rank(options)
    rank.send(*ordered(X, attention_first=attention_first))
    rank.send(*ordered(next_chunk(hashes), attention_first=attention_first))
    return rank


both_orders = pytest.mark.parametrize("attention_first", [False, True])
both_hashes = pytest.mark.parametrize("hashes", HASHES.values(), ids=HASHES)


class Check(NamedTuple):
    """One thing that must be so, and what it is."""

    what: str
    got: int
    want: int


def checks(rank: Rank) -> list[Check]:
    """The whole test; also run against builds that must fail it."""
    whole, divergent = X_TOKENS + Y_TOKENS, X_TOKENS + OTHER
    eight = [*whole[: 8 * BS], 1]
    planes = presence_by_plane(rank.presence)
    return [
        Check("blocks matched of ten", rank.matched(whole), 10),
        Check("tokens reusable of ten blocks", rank.reusable([*whole, 1]), 10 * BS),
        Check("blocks matched with a divergent tail", rank.matched(divergent), 5),
        Check("tokens reusable with a divergent tail", rank.reusable(divergent), 5 * BS),
        Check("blocks matched behind another start", rank.matched(OTHER + Y_TOKENS), 0),
        Check("blocks matched where no state is", rank.matched(eight), 8),
        Check("tokens reusable where no state is", rank.reusable(eight), 5 * BS),
        Check("blocks that operators see", rank.held(), 10),
        Check("records in the store", len(rank.fields), 10),
        Check("names in the index", len({n for held in planes.values() for n in held}), 10),
        Check("presence bits", sum(map(len, planes.values())), 10 + 2),
    ]


def failed(rank: Rank) -> list[str]:
    return [c.what for c in checks(rank) if c.got != c.want]


@both_orders
@both_hashes
@pytest.mark.parametrize("number", range(11))
def test_the_recorded_chunk(hashes: list[int], attention_first: bool, number: int) -> None:
    check = checks(played(hashes, attention_first=attention_first))[number]
    assert check == check._replace(got=check.want)


@both_orders
def test_the_order_inside_the_batch_changes_nothing(attention_first: bool) -> None:
    one = played(OPAQUE, attention_first=attention_first)
    two = played(OPAQUE, attention_first=not attention_first)
    assert presence_by_plane(one.presence) == presence_by_plane(two.presence)
    assert one.fields == two.fields


def test_a_removed_state_bounds_what_can_be_reused_and_not_what_is_held() -> None:
    rank = played(OPAQUE, attention_first=False)
    rank.send(removed([OPAQUE[-1]], group=1))
    assert rank.matched(X_TOKENS + Y_TOKENS) == 10
    assert rank.reusable([*X_TOKENS, *Y_TOKENS, 1]) == 5 * BS


# -- without the filter: the same test must fail ---------------------------------------------------


@both_orders
@both_hashes
def test_it_fails_when_state_groups_are_taken_for_main_ones(
    hashes: list[int], attention_first: bool
) -> None:
    options = Options(treat_as={"mamba": "main"})
    assert failed(played(hashes, attention_first=attention_first, options=options))


@both_orders
@both_hashes
def test_it_fails_when_events_are_read_without_their_groups(
    hashes: list[int], attention_first: bool
) -> None:
    rank = Rank()
    for events in (X, next_chunk(hashes)):
        bare = ("group_idx", "kv_cache_spec_kind")
        rank.send(
            *(
                {k: v for k, v in event.items() if k not in bare}
                for event in ordered(events, attention_first=attention_first)
            )
        )
    assert "records in the store" in failed(rank) or "tokens reusable where no state is" in failed(
        rank
    )


@both_orders
@both_hashes
def test_it_fails_when_only_full_attention_is_admitted(
    hashes: list[int], attention_first: bool
) -> None:
    options = Options(treat_as={MLA: "ignored"})
    wrong = failed(played(hashes, attention_first=attention_first, options=options))
    assert {"blocks matched of ten", "blocks matched with a divergent tail"} <= set(wrong)
