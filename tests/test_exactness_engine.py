"""Never more than the engine would reuse, and as much wherever the wire says it: families of
engines that no recording shows, against a simulator that follows the engine's own procedure."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from enginesim import CHUNKED, STATE, Config, Engine, Group, Prompt, script
from pure import Rank

from kvindexd.residency import Options
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.testing.wire import encode_batch

FULL, MLA = Group(), Group("mla_attention")
WINDOW, WINDOW_MLA = "sliding_window", "sliding_window_mla"


class Family(NamedTuple):
    """`under`: share of probes that may fall short, for what the wire leaves out."""

    config: Config
    extras: str = ""
    under: float = 0.0
    seeds: int = 2
    reports: bool = False


def windows(n: int = 1, size: int = 16, window: int = 48, kind: str = WINDOW) -> tuple[Group, ...]:
    return (Group(kind, size, window),) * n


def states(n: int = 1, size: int = 16) -> tuple[Group, ...]:
    return (Group(STATE, size),) * n


REPEATS = 0.01
"""A prompt of exactly one alignment unit, computed again, looks like a repeat of reused blocks."""
EAGLE = FULL._replace(eagle=True)
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
FAMILIES: dict[str, Family] = {
    "full": Family(Config((FULL,))),
    "full, everything in the prompt": Family(Config((FULL,)), "lsi"),
    "window, state and full": Family(Config((*windows(), *states(), FULL)), under=REPEATS),
    "window, state and full, dense": Family(
        Config((*windows(2), *states(2), FULL), dense=True), "s", under=REPEATS
    ),
    "two main sizes": Family(Config((FULL, Group("mla_attention", 32))), under=REPEATS),
    "two main sizes and a state": Family(
        Config((FULL, Group("mla_attention", 32), *states(1, 32)))
    ),
    "kimi": Family(Config((*states(3), MLA)), "lsi"),
    "blocks of 528": Family(Config((*states(2, 528), Group(size=528)), step=1200), seeds=1),
    "attention 16, state 64": Family(Config((*states(2, 64), FULL)), "si", under=0.02, seeds=1),
    "partial hashes": Family(
        Config((*states(3, 64), Group("mla_attention", 64)), 16), under=0.25, seeds=1
    ),
    "partial hashes, extras": Family(
        Config((*states(3, 64), Group("mla_attention", 64)), 16), "lsi", under=0.4, seeds=1
    ),
    "partial hashes, bytes": Family(
        Config((*states(2, 64), Group("mla_attention", 64)), 16, ints=False), under=0.25, seeds=1
    ),
    "v4": Family(
        Config((*windows(1, 64, 128, WINDOW_MLA), Group("mla_attention", 256)), step=300), seeds=1
    ),
    "gpt-oss": Family(Config((*windows(1, 16, 128), FULL)), "ls"),
    "mixed window sizes": Family(Config((*windows(2, 32, 64), *windows(1, 16, 40), FULL)), "si"),
    "windows alone": Family(Config(windows()), under=0.3),
    "windows alone, extras": Family(Config(windows()), "lsi", under=0.6),
    "windows alone, dense": Family(Config(windows(), dense=True), "ls"),
    "chunked": Family(Config((Group(CHUNKED, 16, 0, 64), FULL)), "s", under=REPEATS),
    "chunked, many": Family(Config((*(Group(CHUNKED, 16, 0, 64),) * 3, FULL, *states()))),
    "eagle": Family(Config((EAGLE,))),
    "eagle, gpt-oss": Family(Config((*windows(1, 16, 48), EAGLE), dense=True)),
    "eagle, gpt-oss sparse": Family(Config((*windows(1, 16, 48), EAGLE))),
    "eagle, kimi": Family(Config((*states(2), MLA._replace(eagle=True)))),
    "eagle, large states": Family(Config((*states(2, 32), EAGLE))),
    "eagle, windows alone": Family(
        Config((Group(WINDOW, 16, 40, eagle=True),), dense=True), under=0.0
    ),
    "lookahead": Family(Config((FULL,), lookahead=1), "s"),
    "lookahead, gpt-oss": Family(Config((*windows(), FULL), lookahead=1), "l"),
    "lookahead, kimi": Family(Config((*states(2), MLA), lookahead=1)),
    "reports reuse, told": Family(Config((FULL,), report=True), reports=True, under=0.1),
    "reports reuse, untold": Family(Config((FULL,), report=True), under=0.1),
    "reports reuse, hybrid untold": Family(Config((*windows(), FULL), report=True), under=0.1),
}
for name in ALGORITHMS:
    for ints in (False, True):
        form = "ints" if ints else "bytes"
        known = name.startswith("sha")
        FAMILIES[f"fine windows, {name} {form}"] = Family(
            Config(
                (*windows(1, 16, 24, WINDOW_MLA), Group("mla_attention", 64)),
                algorithm=name,
                ints=ints,
                seed="vllm-none-hash" if known else "random",
            ),
            under=0.0 if known else 1.0,
            seeds=1,
        )
        FAMILIES[f"windows alone, {name} {form}"] = Family(
            Config(
                windows(), algorithm=name, ints=ints, seed="vllm-none-hash" if known else "random"
            ),
            under=0.3 if known else 1.0,
            seeds=1,
        )
FAMILIES["windows alone, seeded bytes"] = Family(
    Config(windows(), ints=False, seed="42"), under=1.0
)
FAMILIES["kimi, seeded"] = Family(Config((*states(3), MLA), seed="42"), "s")


def run(family: Family, seed: int) -> Counter[str]:
    config = family.config
    engine = Engine(config)
    unit = max(g.size for g in config.groups)
    eagle = any(g.eagle for g in config.groups)
    chunk = max(g.chunk for g in config.groups)
    rank = Rank(Options(reports_reuse=family.reports), WorkerOptions(eagle, chunk))
    figures: Counter[str] = Counter()
    asked: list[Prompt] = []

    def publish() -> None:
        events = engine.take_events()
        if events:
            rank.send_raw(encode_batch(float(rank.seq), events))

    def probe() -> None:
        for p in dict.fromkeys(asked[-7:]):
            for q in {p, p._replace(tokens=p.tokens[: len(p.tokens) * 2 // 3 + 1]), plain(p)}:
                compare(q)

    def compare(q: Prompt) -> None:
        truth = engine.hit(q)
        found = rank.ask(
            q.tokens,
            lora=q.lora[0] if q.lora else "",
            salt=q.salt,
            items=[(n, at) for n, at, _ in q.items if at < len(q.tokens)],
        )
        got = int(found.reusable[0])
        figures["probes"] += 1
        figures["over"] += got > truth
        figures["under"] += got < truth
        figures["nonzero"] += truth > 0

    rng = random.Random(seed)
    for what, value in script(seed, unit=unit, extras=family.extras):
        if what == "reset":
            engine.reset()
            continue
        prompt, output = value
        asked.append(prompt)
        requests = [engine.serve(prompt, output)]
        if what == "both":
            requests.append(engine.serve(asked[-2]))
        while requests:
            for request in list(requests):
                try:
                    next(request)
                except (StopIteration, MemoryError):
                    requests.remove(request)
                    request.close()
            publish()
            if rng.random() < 0.2 or not requests:
                probe()
    return figures


def plain(p: Prompt) -> Prompt:
    return Prompt(p.tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_never_more_than_the_engine_and_as_much_where_the_wire_says_it(name: str) -> None:
    family = FAMILIES[name]
    total: Counter[str] = Counter()
    for seed in range(family.seeds):
        total += run(family, seed)
    assert total["over"] == 0, dict(total)
    assert total["under"] <= family.under * total["probes"], dict(total)
    assert total["nonzero"] > 20, dict(total)
