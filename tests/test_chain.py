"""Content keys: the published vectors, and events and queries meeting in one key space."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd import chain
from kvindexd.chain import BlockExtras, Item

SPEC = Path(__file__).parent.parent / "docs" / "hash-spec.md"
VECTORS: list[dict[str, Any]] = json.loads(
    re.findall(r"```json\n(.*?)```", SPEC.read_text(), re.S)[-1]
)


def hexed(keys: list[int]) -> list[str]:
    return [f"{k:016x}" for k in keys]


def spec_keys(
    tokens: list[int], unit: int, root: int = 0, extras: dict[int, bytes] | None = None
) -> list[int]:
    """The specification's formula, word for word, apart from the code under test."""
    key, out = root, []
    for u in range(len(tokens) // unit):
        body = b"".join(t.to_bytes(4, "little") for t in tokens[u * unit : (u + 1) * unit])
        key = xxhash.xxh3_64_intdigest(body + (extras or {}).get(u, b""), seed=key)
        out.append(key)
    return out


# -- the specification ----------------------------------------------------------------------------


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v["name"])
def test_the_published_vectors(v: dict[str, Any]) -> None:
    lora, salt = v.get("lora_name", ""), v.get("cache_salt", "")
    items = [Item(*i) for i in v.get("items", [])]
    keys = chain.prompt_keys(
        v["tokens"], lora_name=lora, cache_salt=salt, items=items, unit=v["unit"]
    )
    assert hexed([chain.root_key(lora, salt)]) == [v["root"]]
    assert hexed(keys) == v["keys"]
    extras = chain.item_extras(items, v["unit"])
    assert {str(u): b.hex() for u, b in extras.items()} == v.get("extras", {})
    if "lookahead" in v:
        assert hexed(chain.prompt_lookahead(v["tokens"], keys, v["unit"])) == v["lookahead"]


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v["name"])
def test_the_vectors_follow_from_the_written_formula(v: dict[str, Any]) -> None:
    root = 0
    if "lora_name" in v or "cache_salt" in v:
        names = [v.get("lora_name", ""), v.get("cache_salt", "")]
        root = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(names))
    extras = {int(u): bytes.fromhex(b) for u, b in v.get("extras", {}).items()}
    keys = spec_keys(v["tokens"], v["unit"], root, extras)
    assert hexed([root]) == [v["root"]]
    assert hexed(keys) == v["keys"]
    for i, name in enumerate(v.get("lookahead", [])):
        behind = v["tokens"][(i + 1) * v["unit"] :][:1]
        expected = 0
        if behind:
            expected = xxhash.xxh3_64_intdigest(behind[0].to_bytes(4, "little"), seed=keys[i])
        assert name == f"{expected:016x}"


def test_the_documents_worked_bytes() -> None:
    text = SPEC.read_text()
    body = b"".join(t.to_bytes(4, "little") for t in range(1, 17)).hex()
    assert body in re.sub(r"\s", "", text)
    assert f"{xxhash.xxh3_64_intdigest(bytes.fromhex(body)):016x}" in text
    assert msgspec.msgpack.encode(["sql-adapter", ""]).hex() == "92ab73716c2d61646170746572a0"
    assert "92 ab 73716c2d61646170746572 a0" in text
    assert msgspec.msgpack.encode([["img-1", 4]]).hex() == "9192a5696d672d3104"


def test_the_vectors_cover_every_feature() -> None:
    units = {v["unit"] for v in VECTORS}
    assert {1, 16} <= units
    for field in ("lora_name", "cache_salt", "items", "lookahead"):
        assert any(field in v for v in VECTORS)
    assert len({v["name"] for v in VECTORS}) == len(VECTORS)


# -- tokens and units -----------------------------------------------------------------------------


def test_packed_tokens_and_lists_agree() -> None:
    tokens = list(range(40))
    packed = chain.pack_tokens(tokens)
    assert packed[4:8] == b"\x01\0\0\0"
    assert chain.prompt_keys(packed) == chain.prompt_keys(tokens)


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None]])
def test_bad_token_ids_are_named(bad: list[Any]) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        chain.pack_tokens(bad)


def test_packed_length_must_be_a_multiple_of_four() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        chain.prompt_keys(b"\0" * 65)


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [([16], 16), ([64, 768], 16), ([528], 16), ([2096], 16), ([1], 1), ([24], 8), ([], 16)],
)
def test_the_unit_divides_every_block_size(sizes: list[int], unit: int) -> None:
    assert chain.unit_for(chain.UNIT, sizes) == unit


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.sampled_from([1, 2, 8, 16]))
@settings(max_examples=100, deadline=None)
def test_extending_in_pieces_equals_extending_at_once(tokens: list[int], unit: int) -> None:
    packed = chain.pack_tokens(tokens)
    whole = chain.extend(0, packed, unit)
    assert whole == spec_keys(tokens, unit)
    cut = len(whole) // 2 * unit * 4
    first = chain.extend(0, packed[:cut], unit)
    assert first + chain.extend(first[-1] if first else 0, packed[cut:], unit) == whole


# -- roots ----------------------------------------------------------------------------------------


def test_roots_keep_adapters_and_salts_apart() -> None:
    roots = [
        chain.root_key(),
        chain.root_key("x"),
        chain.root_key("", "x"),
        chain.root_key("x", "x"),
        chain.root_key("y", "x"),
        chain.root_key("", "", 1),
        chain.root_key("", "", 2),
        chain.root_key("", "x", 1),
    ]
    assert len(set(roots)) == len(roots)
    assert roots[0] == 0


def test_a_number_counts_only_where_there_is_no_adapter_name() -> None:
    assert chain.root_key("x", "", 1) == chain.root_key("x", "", 2) == chain.root_key("x")


# -- extra keys on the wire -----------------------------------------------------------------------


def parsed(entry: Any, lora: str | None = None, *, root: bool = True) -> tuple[Any, ...]:
    got = chain.parse_extra_keys(entry, lora, at_root=root)
    return got.salt, [tuple(i) for i in got.items], list(got.opaque)


@pytest.mark.parametrize(
    ("entry", "lora", "root", "want"),
    [
        (None, None, True, ("", [], [])),
        ([], None, True, ("", [], [])),
        (["tenant"], None, True, ("tenant", [], [])),
        (["img"], None, False, ("", [("img", 0)], [])),
        ([["img", 3]], None, True, ("", [("img", 3)], [])),
        ([["img", -5]], None, False, ("", [("img", -5)], [])),
        (["x"], "x", True, ("", [], [])),
        (["x"], "y", True, ("x", [], [])),
        (["x", ["img", 3], "salt"], "x", True, ("salt", [("img", 3)], [])),
        (["x", "salt"], "x", True, ("salt", [], [])),
        (["x", "text"], "x", False, ("", [], ["text"])),
        (["a", "b"], None, True, ("a", [], ["b"])),
        (["a", "b"], None, False, ("", [], ["a", "b"])),
        ([b"digest"], None, True, ("", [], [b"digest"])),
        ([{"kind": "new"}, 5], None, False, ("", [], [{"kind": "new"}, 5])),
        ([["img", 1, 2]], None, False, ("", [], [["img", 1, 2]])),
        ("bare", None, True, ("bare", [], [])),
    ],
)
def test_extra_keys_are_read_by_position(entry: Any, lora: Any, root: bool, want: Any) -> None:
    assert parsed(entry, lora, root=root) == want


def test_embeddings_are_recognised() -> None:
    assert chain.parse_extra_keys([b"d"], None, at_root=True).embedding
    assert not chain.parse_extra_keys(["d"], None, at_root=True).embedding


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, int, int]]]:
    """(block size, unit, items): disjoint (identifier, start, length)."""
    size = draw(st.sampled_from([16, 32, 48, 64]))
    unit = draw(st.sampled_from([1, 8, 16]))
    at, items = 0, []
    for n in range(draw(st.integers(0, 5))):
        at += draw(st.integers(0, 40))
        length = draw(st.integers(1, 70))
        items.append((f"img{n % 3}", at, length))
        at += length
    return size, unit, items


def wire_extras(
    items: list[tuple[str, int, int]], blocks: int, size: int
) -> Iterator[list[list[Any]] | None]:
    """What an engine writes: in every block the items that reach into it, from its start."""
    for b in range(blocks):
        lo, hi = b * size, (b + 1) * size
        inside = [[n, s - lo] for n, s, length in items if s < hi and s + length > lo]
        yield inside or None


@given(prompts())
@settings(max_examples=200, deadline=None)
def test_events_and_queries_agree_on_items_for_every_block_size(
    case: tuple[int, int, list[tuple[str, int, int]]],
) -> None:
    size, unit, items = case
    blocks = 192 // size
    tokens = chain.pack_tokens(list(range(blocks * size)))
    entries = {
        i: chain.parse_extra_keys(e, None, at_root=i == 0)
        for i, e in enumerate(wire_extras(items, blocks, size))
        if e
    }
    event_side = chain.extend(0, tokens, unit, chain.block_extras(entries, size, unit))
    query_side = chain.prompt_keys(tokens, items=[Item(n, s) for n, s, _ in items], unit=unit)
    assert event_side == query_side


def test_opaque_parts_keep_blocks_apart_beside_items() -> None:
    def keys(*opaque: Any) -> list[int]:
        extra = BlockExtras("", (Item("img", 3),), opaque, False)
        return chain.extend(0, bytes(128), 16, chain.block_extras({0: extra}, 32, 16))

    assert len({keys()[0], keys(b"d")[0], keys(b"e")[0], keys({"a": 1})[0]}) == 4
    assert keys() == chain.prompt_keys(bytes(128), items=[Item("img", 3)])


def test_an_item_enters_once_and_all_later_keys_differ() -> None:
    plain = chain.prompt_keys(bytes(4 * 64))
    imaged = chain.prompt_keys(bytes(4 * 64), items=[Item("i", 20)])
    assert plain[0] == imaged[0]
    assert all(a != b for a, b in zip(plain[1:], imaged[1:], strict=True))


# -- lookahead ------------------------------------------------------------------------------------


def test_lookahead_names_leave_the_chain_alone() -> None:
    tokens = list(range(33))
    keys = chain.prompt_keys(tokens)
    names = chain.prompt_lookahead(tokens, keys)
    assert names == [
        chain.lookahead_key(keys[0], chain.pack_tokens([16])),
        chain.lookahead_key(keys[1], chain.pack_tokens([32])),
    ]
    assert chain.prompt_lookahead(tokens[:32], keys)[1] == 0
    assert not set(names) & set(keys)
