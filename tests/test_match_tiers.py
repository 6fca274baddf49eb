"""How far a worker could resume a prompt: EAGLE, tiers and geometry, by hand-made examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from held import CHUNKED, DEV, DISK, FULL16, HOST, reuse, run, shape, upto
from pure import FULL, MAMBA, MLA, WINDOW

from kvindexd import chain
from kvindexd.groups import CHUNK_KINDS
from kvindexd.scoring.geometry import Spec, WorkerOptions, blocks_back
from kvindexd.scoring.query import ChainQuery, Query

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
