"""KV layouts: head-major by position, resolution, and what can be transferred."""

from __future__ import annotations

import itertools

import pytest

from kvindexd.layout import Layout, Side, head_major, resolve, transfer

LHNBC = (0, 2, 3, 1, 4)
"""No engine's layout: the one on which positions and entries part ways."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LBHNC", True),
        ("LBNHC", False),
        ("LHBNC", True),
        ("BLHNC", True),
        ("BLNHC", False),
        ("BHLNC", True),
    ],
)
def test_head_major_is_h_outside_n(name: str, expected: bool) -> None:
    assert head_major(Layout.parse(name).value) is expected


def test_head_major_compares_positions_not_entries() -> None:
    by_entries = LHNBC[2] < LHNBC[3]
    assert head_major(LHNBC)
    assert by_entries is False


def test_requested_layout_resolves_for_all_36_pairs() -> None:
    for requested, only in itertools.product(Layout, Layout):
        assert resolve([only], requested=requested) is only


def test_same_order_is_preferred_over_the_first_choice() -> None:
    candidates = [Layout.BLNHC, Layout.BLHNC]
    assert resolve(candidates, requested=Layout.LBHNC) is Layout.BLHNC
    assert resolve([Layout.BLNHC], requested=Layout.LBHNC) is Layout.BLNHC
    assert resolve(candidates, requested=Layout.LBNHC) is Layout.BLNHC
    assert resolve(candidates, requested=Layout.BLHNC) is Layout.BLHNC
    assert resolve(candidates) is Layout.BLNHC


def test_explicit_setting_wins_or_is_an_error() -> None:
    both = [Layout.BLNHC, Layout.BLHNC]
    assert resolve(both, requested=Layout.BLHNC, explicit=Layout.BLNHC) is Layout.BLNHC
    with pytest.raises(
        ValueError, match=r"LBHNC is set but not supported; these are: BLNHC, BLHNC"
    ):
        resolve(both, explicit=Layout.LBHNC)
    with pytest.raises(ValueError, match="no KV layout"):
        resolve([])


def side(layout: str, tp: int = 1, heads: int = 8, block: int = 16) -> Side:
    return Side(Layout.parse(layout), tp, heads, block)


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC", "BLHNC", "BHLNC"])
def test_head_major_pages_are_cut_between_tp_sizes(layout: str) -> None:
    assert transfer(side(layout, 1), side(layout, 2)).transferable


@pytest.mark.parametrize("layout", ["BLNHC", "LBNHC"])
def test_token_major_pages_cannot_be_cut_and_both_pages_are_named(layout: str) -> None:
    verdict = transfer(side(layout, 1), side(layout, 2))
    assert not verdict.transferable
    assert f"prefill: {layout} (one row per page), TP 1" in verdict.reason
    assert f"decode: {layout} (one row per page), TP 2" in verdict.reason


def test_one_token_major_side_is_enough_to_refuse() -> None:
    verdict = transfer(side("BLHNC", 1), side("BLNHC", 2))
    assert not verdict.transferable
    assert "slices per KV head" in verdict.reason
    assert "one row per page" in verdict.reason


@pytest.mark.parametrize("layout", [layout.name for layout in Layout])
def test_equal_tp_moves_whole_pages_in_any_common_layout(layout: str) -> None:
    assert transfer(side(layout, 4), side(layout, 4)).transferable


def test_refusals_say_which_check_failed() -> None:
    assert "block sizes differ" in transfer(side("BLHNC"), side("BLHNC", block=32)).reason
    assert "same layout" in transfer(side("BLHNC"), side("LBHNC")).reason
    assert "do not divide" in transfer(side("BLHNC", 1, 6), side("BLHNC", 4, 6)).reason
    assert "KV heads differ" in transfer(side("BLHNC", 1, 8), side("BLHNC", 2, 4)).reason
    unknown = Side(None, 1, 8, 16)
    assert "not registered" in transfer(unknown, side("BLHNC")).reason


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC"):
        Layout.parse("NHWC")


@pytest.mark.parametrize("requested", Layout)
@pytest.mark.parametrize("candidate", Layout)
def test_request_beside_an_opposite_first_choice(requested: Layout, candidate: Layout) -> None:
    """All 36 pairs: a candidate of the requested order beats a first choice that is not."""
    order = head_major(requested.value)
    first = Layout.BLNHC if order else Layout.BLHNC
    expected = candidate if head_major(candidate.value) == order else first
    assert resolve([first, candidate], requested=requested) is expected
    # Without a request, or with a setting, the request's rule does not come in.
    assert resolve([first, candidate]) is first
    assert resolve([first, candidate], requested=requested, explicit=candidate) is candidate


def test_unknown_block_sizes_matter_only_where_pages_are_cut() -> None:
    assert transfer(side("BLHNC", 2, 8, 0), side("BLHNC", 2, 8, 0)).transferable
    verdict = transfer(side("BLHNC", 1, 8, 0), side("BLHNC", 2, 8, 16))
    assert not verdict.transferable
    assert "block sizes differ or are not known" in verdict.reason
