"""How far a worker could resume a prompt: each group kind's rule, by hand-made examples."""

from __future__ import annotations

from typing import Any

import pytest
from held import CHUNKED, DEV, FULL16, Held, reuse, run, shape, upto
from pure import FULL, MAMBA, MLA, WINDOW, Rank, stored

from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.match import match

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
