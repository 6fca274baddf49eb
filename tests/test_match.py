"""How far a worker could resume a prompt: each group kind's rule, by hand-made examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pure import FULL, MAMBA, MLA, WINDOW, Rank, stored

from kvindexd import chain
from kvindexd.groups import CHUNK_KINDS
from kvindexd.model import GroupInfo, Plane, Profile, Tier
from kvindexd.scoring.geometry import Geometry, Spec, WorkerOptions, blocks_back, geometry
from kvindexd.scoring.match import Bools, Match, match
from kvindexd.scoring.query import ChainQuery, Query

CHUNKED = "chunked_local_attention"


class Held:
    """Presence by hand: (spec index, tier, entry size) -> the tokens at which entries end."""

    workers = 1

    def __init__(self, geometry: Geometry, tokens: int, held: dict[tuple[int, int, int], Any]):
        specs = {s.idx: s for s in (*geometry.main, *geometry.auxiliary)}
        self._tokens = tokens
        self._held: dict[Plane, set[int]] = {}
        for (idx, tier, entry), ends in held.items():
            if idx in specs:
                self._held[specs[idx].plane(tier, entry)] = set(ends)

    def held(self, plane: Plane, entry: int) -> Bools | None:
        ends = self._held.get(plane)
        if ends is None:
            return None
        rows = range(entry, self._tokens // entry * entry + 1, entry)
        return np.array([e in ends for e in rows], bool).reshape(-1, 1)


def shape(
    groups: list[tuple[str, int, int]],
    held: dict[tuple[int, int, int], Any],
    options: WorkerOptions,
    *,
    pairs: bool = False,
    hybrid: bool = True,
) -> Geometry:
    mains = (FULL, MLA, "")
    infos = tuple(
        GroupInfo(i, kind, size, window, "main" if kind in mains else "auxiliary", 1)
        for i, (kind, size, window) in enumerate(groups)
    )
    planes = {Plane(t, *groups[i], e) for i, t, e in held}
    planes |= {Plane(0, *g, g[1]) for g in groups}
    unit = chain.unit_for(16, [g[1] for g in groups])
    profile = Profile(unit=unit, groups=infos, planes=tuple(sorted(planes)), pairs=pairs)
    return geometry(profile, options, hybrid)


def run(
    groups: list[tuple[str, int, int]],
    tokens: int,
    held: dict[tuple[int, int, int], Any],
    *,
    options: WorkerOptions | None = None,
    device_only: bool = False,
    **more: Any,
) -> Match:
    """Groups are (kind, block size, window); `held` is (group, tier, entry) -> ends in tokens."""
    geo = shape(groups, held, options or WorkerOptions(), **more)
    return match(Held(geo, tokens, held), geo, tokens, device_only=device_only)


def reuse(*args: Any, **more: Any) -> int:
    return int(run(*args, **more).reusable[0])


def upto(end: int, size: int = 16, start: int = 0) -> list[int]:
    """Ends of the blocks of `size` between two boundaries."""
    return list(range(start + size, end + 1, size))


FULL16 = (FULL, 16, 0)
DEV, HOST, DISK = int(Tier.DEVICE), int(Tier.HOST), int(Tier.STORAGE)


# -- main groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FULL, MLA, "sink_full_attention"])
def test_full_attention_needs_every_block_from_the_root(kind: str) -> None:
    rank = Rank()
    tokens = list(range(160))
    rank.send(stored(range(1, 11), tokens, kind=kind))
    assert rank.reusable([*tokens, 1]) == 160
    rank.send({"type": "BlockRemoved", "block_hashes": [4], "medium": "GPU", "group_idx": 0})
    assert rank.reusable([*tokens, 1]) == 48


def test_the_last_token_is_always_computed() -> None:
    held = {(0, DEV, 16): upto(160)}
    assert [reuse([FULL16], n, held) for n in (15, 16, 17, 32, 33, 160, 161)] == [
        0, 0, 16, 16, 32, 144, 160,
    ]  # fmt: skip
    assert int(run([FULL16], 160, held).matched[0]) == 160


def test_pairs_cost_two_tokens() -> None:
    held = {(0, DEV, 16): upto(160)}
    assert [reuse([FULL16], n, held, pairs=True) for n in (17, 18, 33, 34)] == [0, 16, 16, 32]


def test_an_empty_prompt_and_an_empty_worker_answer_zero() -> None:
    assert reuse([FULL16], 0, {(0, DEV, 16): upto(32)}) == 0
    assert reuse([FULL16], 64, {}) == 0
    nothing = match(
        Held(shape([], {}, WorkerOptions()), 64, {}), shape([], {}, WorkerOptions()), 64
    )
    assert (int(nothing.matched[0]), int(nothing.reusable[0])) == (0, 0)


# -- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "blocks"),
    [(1, 1), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3), (64, 4), (65, 4), (66, 5)],
)
def test_a_window_needs_the_blocks_that_its_tokens_touch(window: int, blocks: int) -> None:
    groups = [FULL16, (WINDOW, 16, window)]
    ends = upto(160)
    held = {(0, DEV, 16): ends, (1, DEV, 16): ends[len(ends) - blocks :]}
    assert reuse(groups, 161, held) == 160
    if blocks:
        short = {**held, (1, DEV, 16): ends[len(ends) - blocks + 1 :]}
        assert reuse(groups, 161, short) < 160


def test_a_window_resumes_where_its_tail_is_whole() -> None:
    groups = [FULL16, (WINDOW, 16, 33)]  # two blocks
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): [48, 64, 96, 128, 144]}
    assert reuse(groups, 161, held) == 144
    held[1, DEV, 16] = [48, 64, 96, 144]
    assert reuse(groups, 161, held) == 64


def test_a_prefix_shorter_than_the_window_must_be_whole() -> None:
    groups = [FULL16, (WINDOW, 16, 129)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): upto(64)}
    assert reuse(groups, 161, held) == 64
    held[1, DEV, 16] = upto(64)[1:]
    assert reuse(groups, 161, held) == 0


def test_a_window_of_unknown_width_counts_only_from_the_root() -> None:
    groups = [FULL16, (WINDOW, 16, 0)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): upto(160)[1:]}
    assert reuse(groups, 161, held) == 0


def test_a_model_of_windows_alone_matches_nothing_and_reuses() -> None:
    found = run([(WINDOW, 16, 33)], 161, {(0, DEV, 16): [128, 144]})
    assert (int(found.matched[0]), int(found.reusable[0])) == (0, 144)


# -- chunks ---------------------------------------------------------------------------------------


def test_a_chunk_needs_the_blocks_from_its_own_start() -> None:
    groups = [FULL16, (CHUNKED, 16, 0)]
    chunked = WorkerOptions(chunk_size=64)
    held: dict[tuple[int, int, int], Any] = {(0, DEV, 16): upto(160), (1, DEV, 16): [80, 96]}
    assert reuse(groups, 161, held, options=chunked) == 128  # a chunk's own start needs nothing
    assert reuse(groups, 120, held, options=chunked) == 96
    held[1, DEV, 16] = [96]
    assert reuse(groups, 120, held, options=chunked) == 64
    held[1, DEV, 16] = [16, 32]
    assert reuse(groups, 60, held, options=chunked) == 32


def test_a_chunk_that_is_no_multiple_of_the_block_needs_the_block_it_begins_in() -> None:
    groups = [FULL16, (CHUNKED, 16, 0)]
    chunked = WorkerOptions(chunk_size=40)  # 80 = 2 * 40; 40 lies inside the block [32, 48)
    held: dict[tuple[int, int, int], Any] = {(0, DEV, 16): upto(64), (1, DEV, 16): [64]}
    assert reuse(groups, 65, held, options=chunked) == 0
    held[1, DEV, 16] = [48, 64]
    assert reuse(groups, 65, held, options=chunked) == 64


def test_without_the_chunk_size_only_a_whole_prefix_is_sure() -> None:
    groups = [FULL16, (CHUNKED, 16, 0)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): [80, 96]}
    assert reuse(groups, 161, held) == 0
    held[1, DEV, 16] = upto(48)
    assert reuse(groups, 161, held) == 48


# -- states ---------------------------------------------------------------------------------------


def test_a_state_group_needs_the_one_block_that_ends_there() -> None:
    groups = [FULL16, (MAMBA, 16, 0)]
    held: dict[tuple[int, int, int], Any] = {(0, DEV, 16): upto(160), (1, DEV, 16): [80, 128]}
    assert [reuse(groups, n, held) for n in (161, 129, 128, 81, 80)] == [128, 128, 80, 80, 0]


def test_the_largest_common_boundary_is_not_the_least_of_the_largest() -> None:
    # Ten full blocks, states at 5 and 8, and a window of two blocks that lacks block 8.
    groups = [FULL16, (MAMBA, 16, 0), (WINDOW, 16, 33)]
    held = {
        (0, DEV, 16): upto(160),
        (1, DEV, 16): [80, 128],
        (2, DEV, 16): [16, 32, 48, 64, 80, 96, 112, 144, 160],
    }
    found = run(groups, 161, held)
    assert int(found.reusable[0]) == 80
    assert [int(x[0]) for x in found.limits] == [160, 128, 160]
    assert int(found.matched[0]) == 160


def test_attention_only_is_the_main_groups_answer() -> None:
    groups = [FULL16, (MAMBA, 16, 0)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): [80]}
    assert reuse(groups, 161, held, hybrid=False) == 160


# -- sizes ----------------------------------------------------------------------------------------


def test_boundaries_are_multiples_of_all_block_sizes() -> None:
    groups = [(FULL, 48, 0), (WINDOW, 32, 33)]
    held = {(0, DEV, 48): upto(480, 48), (1, DEV, 32): upto(480, 32)}
    assert reuse(groups, 481, held) == 480
    assert reuse(groups, 400, held) == 384  # 96 divides it


def test_two_main_groups_agree_on_a_boundary_of_both() -> None:
    groups = [(FULL, 32, 0), (MLA, 48, 0)]
    held = {(0, DEV, 32): upto(160, 32), (1, DEV, 48): upto(240, 48)}
    found = run(groups, 241, held)
    assert int(found.matched[0]) == 96
    assert int(found.reusable[0]) == 96


def test_two_main_groups_of_one_size_take_the_shorter_run() -> None:
    groups = [FULL16, (MLA, 16, 0)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): upto(96)}
    found = run(groups, 161, held)
    assert (int(found.matched[0]), int(found.reusable[0])) == (96, 96)


def test_a_partial_entry_extends_a_run_of_full_blocks() -> None:
    groups = [(FULL, 64, 0), (MAMBA, 64, 0)]
    held: dict[tuple[int, int, int], Any] = {
        (0, DEV, 64): [64],
        (0, DEV, 16): [96],
        (1, DEV, 64): [64],
        (1, DEV, 16): [96],
    }
    found = run(groups, 129, held)
    assert (int(found.matched[0]), int(found.reusable[0])) == (96, 96)
    assert reuse(groups, 96, held) == 64
    assert int(run(groups, 96, held).matched[0]) == 64  # nobody looks for an entry at the end
    held[0, DEV, 64] = []
    assert reuse(groups, 129, held) == 0


def test_a_partial_entry_counts_only_where_a_state_group_has_such_too() -> None:
    held: dict[tuple[int, int, int], Any] = {(0, DEV, 64): [64], (0, DEV, 16): [96]}
    found = run([(FULL, 64, 0)], 129, held)
    assert (int(found.matched[0]), int(found.reusable[0])) == (64, 64)
    held |= {(1, DEV, 16): upto(128)}
    assert reuse([(FULL, 64, 0), (WINDOW, 16, 17)], 129, held) == 64
    states = [(FULL, 64, 0), (MAMBA, 64, 0), (WINDOW, 32, 33)]
    held = {
        (0, DEV, 64): [64],
        (0, DEV, 16): [96],
        (1, DEV, 16): [96],
        (1, DEV, 64): [64],
        (2, DEV, 32): [32, 64, 96],
    }
    assert reuse(states, 129, held) == 64  # such windows know whole blocks alone


def test_partial_entries_of_states() -> None:
    groups = [(FULL, 64, 0), (MAMBA, 64, 0)]
    held = {
        (0, DEV, 64): [64, 128],
        (0, DEV, 16): [80, 96],
        (1, DEV, 64): [64],
        (1, DEV, 16): [80],
    }
    assert reuse(groups, 129, held) == 80
    assert reuse(groups, 80, held) == 64


# -- EAGLE ----------------------------------------------------------------------------------------


def test_eagle_drops_the_last_matched_block() -> None:
    eagle = WorkerOptions(eagle=True)
    held = {(0, DEV, 16): upto(160)}
    found = run([FULL16], 161, held, options=eagle)
    assert (int(found.matched[0]), int(found.reusable[0])) == (160, 144)
    assert reuse([FULL16], 160, held, options=eagle) == 128
    assert reuse([FULL16], 17, held, options=eagle) == 0


def test_eagle_drops_before_the_other_groups_lower_it() -> None:
    eagle = WorkerOptions(eagle=True)
    groups = [FULL16, (MAMBA, 16, 0)]
    held = {(0, DEV, 16): upto(160), (1, DEV, 16): [96, 160]}
    assert reuse(groups, 161, held, options=eagle) == 96
    held[1, DEV, 16] = [96, 144]
    assert reuse(groups, 161, held, options=eagle) == 144


def test_eagle_on_windows_alone_drops_and_checks_again() -> None:
    eagle = WorkerOptions(eagle=True)
    held = {(0, DEV, 16): [48, 64, 128, 144, 160]}
    assert reuse([(WINDOW, 16, 33)], 161, held, options=eagle) == 144
    held = {(0, DEV, 16): [48, 64, 144, 160]}
    assert reuse([(WINDOW, 16, 33)], 161, held, options=eagle) == 0
    held = {(0, DEV, 16): [32, 48, 64, 144, 160]}
    assert reuse([(WINDOW, 16, 33)], 161, held, options=eagle) == 48
    assert reuse([(WINDOW, 16, 33)], 161, {(0, DEV, 16): upto(32)}, options=eagle) == 16


def test_eagle_drops_a_block_of_the_run_before_it_is_aligned() -> None:
    eagle = WorkerOptions(eagle=True)
    groups = [FULL16, (MAMBA, 32, 0)]
    held = {(0, DEV, 16): upto(48), (1, DEV, 32): [32, 64]}
    assert reuse(groups, 161, held, options=eagle) == 32
    held[0, DEV, 16] = upto(32)
    assert reuse(groups, 161, held, options=eagle) == 0
    fine = {(0, DEV, 64): [64, 128], (1, DEV, 64): [64], (1, DEV, 16): [112]}
    groups = [(FULL, 64, 0), (MAMBA, 64, 0)]
    assert reuse(groups, 161, fine, options=eagle) == 112


# -- tiers ----------------------------------------------------------------------------------------


def tiers(*args: Any, **more: Any) -> tuple[int, ...]:
    found = run(*args, **more)
    assert sum(int(t[0]) for t in found.tiers) == int(found.reusable[0])
    return tuple(int(t[0]) for t in found.tiers)


def test_tiers_are_walked_device_host_storage() -> None:
    held = {(0, DEV, 16): upto(48), (0, HOST, 16): upto(96), (0, DISK, 16): upto(160)}
    assert tiers([FULL16], 161, held) == (48, 48, 64)
    assert tiers([FULL16], 161, held, device_only=True) == (48, 0, 0)


def test_a_host_block_in_the_middle_makes_what_follows_host_too() -> None:
    held = {(0, DEV, 16): [16, 32, 64, 80], (0, HOST, 16): [48, 64, 80]}
    assert tiers([FULL16], 161, held) == (32, 48, 0)
    held = {(0, DEV, 16): [16, 32, 64, 80], (0, HOST, 16): [48]}
    assert tiers([FULL16], 161, held) == (32, 16, 0)


def test_matched_counts_a_block_in_whatever_tier() -> None:
    held = {(0, DEV, 16): [16, 48], (0, HOST, 16): [32], (0, DISK, 16): [64]}
    assert int(run([FULL16], 161, held).matched[0]) == 64
    assert int(run([FULL16], 161, held, device_only=True).matched[0]) == 16


def test_offloaded_chunks_load_only_whole() -> None:
    held = {(0, DEV, 16): [16], (0, HOST, 64): [64]}
    assert tiers([FULL16], 161, held) == (16, 0, 0)  # no load is smaller than a chunk
    held = {(0, DEV, 16): [16], (0, HOST, 64): [64, 128]}
    assert tiers([FULL16], 161, held) == (16, 112, 0)
    held = {(0, DEV, 16): upto(80), (0, HOST, 64): [64, 128]}
    assert tiers([FULL16], 161, held) == (80, 0, 0)
    assert int(run([FULL16], 161, held).matched[0]) == 128


def test_a_hybrid_needs_its_state_in_the_tier_that_it_resumes_from() -> None:
    groups = [FULL16, (MAMBA, 16, 0)]
    held = {
        (0, DEV, 16): upto(96),
        (1, DEV, 16): [48],
        (0, HOST, 16): upto(96),
        (1, HOST, 16): [96],
    }
    assert tiers(groups, 161, held) == (48, 48, 0)


# -- geometry -------------------------------------------------------------------------------------


def test_blocks_back_per_kind() -> None:
    def back(kind: str, window: int = 0, chunk: int = 0) -> int | None:
        return blocks_back(Spec(kind, 16, window, 0, ((16,), (), ())), chunk)

    assert back(FULL) is None
    assert back("") is None
    assert back(MAMBA) == 1
    assert back(WINDOW, 128) == 8
    assert back(WINDOW) is None
    assert [back(k, chunk=64) for k in CHUNK_KINDS] == [4]
    assert back(CHUNKED) is None


def test_alignment_is_the_least_common_multiple_or_the_partial_size() -> None:
    sizes = [FULL16, (MAMBA, 48, 0), (WINDOW, 32, 64)]
    assert shape(sizes, {}, WorkerOptions()).alignment == 96
    assert shape(sizes, {}, WorkerOptions(), hybrid=False).alignment == 16
    partial = {(1, DEV, 16): []}
    assert shape([(FULL, 64, 0), (MAMBA, 64, 0)], partial, WorkerOptions()).alignment == 16


def test_block_size_is_the_lowest_main_groups() -> None:
    assert (
        shape([(WINDOW, 32, 64), (FULL, 64, 0), (MLA, 16, 0)], {}, WorkerOptions()).block_size == 64
    )
    assert shape([(WINDOW, 32, 64), (MAMBA, 16, 0)], {}, WorkerOptions()).block_size == 32


# -- queries --------------------------------------------------------------------------------------


def test_a_query_hashes_once_per_unit_and_entry() -> None:
    query = Query(chain.pack_tokens(range(64)))
    assert query.keys(16) is query.keys(16)
    assert query.names(16, 0, 32) is query.names(16, 0, 32)
    assert query.names(16, 0, 32).tolist() == query.keys(16).tolist()[1::2]  # type: ignore[union-attr]


def test_lookahead_names_need_the_tokens_behind() -> None:
    query = Query(chain.pack_tokens(range(33)))
    names = query.names(16, 1, 16)
    assert names is not None
    assert names.tolist() == chain.prompt_lookahead(range(33), chain.prompt_keys(range(33)))
    two = query.names(16, 2, 16)
    assert two is not None
    assert two.tolist()[1] == 0


def test_client_keys_answer_for_their_unit_alone() -> None:
    tokens = list(range(64))
    keys = np.array(chain.prompt_keys(tokens), np.uint64)
    ahead = np.array(chain.prompt_lookahead(tokens, keys.tolist()), np.uint64)
    query = ChainQuery(keys, 16, 64, ahead)
    plain = Query(chain.pack_tokens(tokens))
    assert query.keys(1) is None
    assert query.names(1, 0, 1) is None
    for lookahead in (0, 1):
        for entry in (16, 32):
            one, two = query.names(16, lookahead, entry), plain.names(16, lookahead, entry)
            assert one is not None
            assert two is not None
            assert one.tolist() == two.tolist()
    assert ChainQuery(keys, 16, 64, None).names(16, 1, 16) is None
    assert query.names(16, 2, 16) is None
