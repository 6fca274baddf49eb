"""What is nearly held where a prompt is not: roots, front tokens, branches; without a server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from held import Held, shape
from pure import FULL

from kvindexd import chain
from kvindexd.model import ADD, MUTATION, Plane, Tier, WorkerKey
from kvindexd.replica import Table
from kvindexd.scoring import nearest
from kvindexd.scoring.explain import DEVICE, HOST, MISSING, runs
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.nearest import (
    MAX_DROPPED,
    Shape,
    first_block_held,
    first_tokens,
    known_roots,
    of_first_token,
    variations,
)
from kvindexd.scoring.query import Query
from kvindexd.survey import Survey

PLANE = Plane(Tier.DEVICE, FULL, 64, 0, 64)
PROMPT = list(range(100, 400))


def query(tokens: Sequence[int], **more: str) -> Query:
    return Query(chain.pack_tokens(tokens), **more)


def table_with(*queries: Query, lookahead: int = 0, size: int = 64) -> Table:
    """A table in which one worker holds every full block of some prompts."""
    table = Table(seed=1)
    column = table.column(WorkerKey("", "w", 0))
    for q in queries:
        keys, names = q.keys(16), q.names(16, lookahead, size)
        assert keys is not None
        assert names is not None
        rows = np.zeros(len(names), MUTATION)
        ends = np.arange(1, len(names) + 1) * size
        rows["name"], rows["length"], rows["op"] = names, ends, ADD
        rows["parent"] = [q.root if e == size else keys[(e - size) // 16 - 1] for e in ends]
        table.apply(column, [table.plane_id(PLANE)], rows)
    return table


def survey(table: Table, at: int, known: Sequence[int] = (), slice_: int = 3) -> Survey:
    found, low = Survey(at, [64], known), 1
    while (links := table.links(low, slice_)) is not None:
        found.add(links)
        low += slice_
    return found


def test_a_survey_finds_the_roots_and_the_branches() -> None:
    plain, salted = query(PROMPT), query(PROMPT, cache_salt="s")
    branch = query([*PROMPT[:128], *range(64)])
    table = table_with(plain, salted, branch, query(range(64)))
    keys, own = plain.keys(16), plain.names(16, 0, 64)
    assert keys is not None
    assert own is not None
    found = survey(table, int(keys[128 // 16 - 1]), [int(own[2])])
    assert found.branches == 1  # the branch's third block, not the prompt's own
    assert found.roots == {0: 2, salted.root: 1}
    assert survey(table, 0, [int(own[0])]).branches == 1
    assert survey(Table(), 0).roots == {}


def test_rows_given_up_are_no_blocks() -> None:
    table = table_with(query(PROMPT))
    table.free_column(WorkerKey("", "w", 0))
    while table.scrub():
        pass
    assert survey(table, 0).roots == {}
    assert table.links(10_000, 5) is None


def test_roots_that_can_be_named() -> None:
    named = known_roots("lora", "salt", ["other"])
    assert {root: r.change for root, r in named.items()} == {
        chain.root_key("lora", ""): "salt",
        chain.root_key("", "salt"): "adapter",
        chain.root_key("", ""): "adapter",
        chain.root_key("other", "salt"): "adapter",
        chain.root_key("other", ""): "adapter",
    }
    assert named[chain.root_key("other", "")].detail == (
        "as asked for with adapter 'other' and no cache salt"
    )
    assert known_roots("", "", []) == {}


def held_variations(table: Table, q: Query, known: dict[int, int] | None = None) -> list[str]:
    kinds = [Shape(16, 0, 64)]
    roots = survey(table, q.root).roots if known is None else known
    found = variations(q, roots, known_roots(q.lora_name, q.cache_salt, []))
    return [v.change for v in found if first_block_held(table, v.query, kinds)]


def test_forms_of_a_prompt_that_are_held() -> None:
    table = table_with(query(PROMPT), query(PROMPT, lora_name="secret"))
    assert held_variations(table, query(PROMPT, cache_salt="x")) == ["salt", "root"]
    assert held_variations(table, query(PROMPT, lora_name="x")) == ["adapter", "root"]
    assert held_variations(table, query([7] * 5 + PROMPT)) == ["tokens_dropped"]
    assert held_variations(table, query([7] * (MAX_DROPPED + 1) + PROMPT)) == []
    assert held_variations(table, query(PROMPT[1:])) == []
    assert held_variations(table, query(PROMPT[:64])) == ["root"]  # but the own one is held, too
    assert held_variations(table, query([])) == []


def test_media_that_the_engine_did_not_name() -> None:
    table = table_with(query(PROMPT))
    asked = Query(chain.pack_tokens(PROMPT), items=[chain.Item("img", 3)])
    assert held_variations(table, asked) == ["items"]
    # Dropping tokens moves media along.
    moved = Query(chain.pack_tokens([7, *PROMPT]), items=[chain.Item("img", 4)])
    assert held_variations(table_with(asked), moved) == ["tokens_dropped"]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("size", [16, 64])
def test_a_first_token_is_found_by_trying(
    lookahead: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "VOCABULARY", 4096)
    kinds = [Shape(16, lookahead, size)]
    table = table_with(query(PROMPT), lookahead=lookahead, size=size)
    for added, asked in ((True, PROMPT[1:]), (False, [5, *PROMPT[1:]])):
        q = query(asked)
        found = [hit for hit in first_tokens(table, q, kinds) if hit is not None]
        assert found == [(100, added)]
        form = of_first_token(q, 100, added=added)
        assert form.change == ("token_added" if added else "token_replaced")
        assert form.query.packed == chain.pack_tokens(PROMPT)
        assert first_block_held(table, form.query, kinds)
    short = query(PROMPT[1 : size - 1])
    assert not any(first_tokens(table, short, kinds))


def test_usual_first_tokens_are_tried_before_all_others() -> None:
    bos = 128_000
    table = table_with(query([bos, *PROMPT]))
    assert next(first_tokens(table, query(PROMPT), [Shape(16, 0, 64)])) == (bos, True)


def test_every_block_of_an_offloaded_chunk_is_shown_as_held() -> None:
    """A chunk of four blocks can be loaded whole, and the match counts on it."""
    held = {(0, Tier.DEVICE, 16): [16], (0, Tier.HOST, 64): [64]}
    geometry = shape([(FULL, 16, 0)], held, WorkerOptions())
    (run,) = runs(Held(geometry, 100, held), geometry, 100)
    assert list(run.held) == [DEVICE, HOST, HOST, HOST, MISSING, MISSING]
