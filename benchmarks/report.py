"""Results as a table."""

from __future__ import annotations

from typing import Any

Row = tuple[str, str, str, str]


def _find(results: dict[str, Any], **wanted: Any) -> dict[str, Any] | None:
    for row in results.get("queries", []):
        if all(row[k] == v for k, v in wanted.items()):
            return dict(row)
    return None


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def targets(results: dict[str, Any]) -> list[Row]:
    """(what, target, measured, met or missed) for every target that this run can speak of."""
    rows: list[Row] = []
    base = {"ranks": 64, "blocks": 1000, "shape": "hit", "connections": 1}
    tokens = _find(results, by="tokens", **base)
    batches = _find(results, by="batches", **base)
    if tokens and "p50_ratio" in tokens:
        for key, name, limit in (("p50_ratio", "p50", 0.7), ("cpu_us_ratio", "server CPU", 0.6)):
            rows.append(
                (
                    f"token query, 1,000 blocks, 64 ranks, 1 connection: {name}",
                    f"<= {limit} of the peer's",
                    f"{tokens[key]}",
                    _verdict(tokens[key] <= limit),
                )
            )
    if batches and batches.get("cpu_us_ratio"):
        ratio = batches["cpu_us_ratio"]
        rows.append(
            (
                "by hash, in batches of 32: server CPU per query",
                "<= 1.0 of the peer's",
                f"{ratio}",
                _verdict(ratio <= 1),
            )
        )
    inside = results.get("inprocess")
    if inside:
        us = inside["match_64_ranks_1000_blocks_hit"]["match"]["p50_us"]
        graded = inside["match_64_ranks_1000_blocks_graded"]["match"]["p50_us"]
        rows.append(
            (
                "matching alone, in process, 1,000 blocks, 64 ranks",
                "<= 60 us",
                f"{us} us ({graded} us graded)",
                _verdict(us <= 60),
            )
        )
        feed = inside["feed_entries_of_64"]
        rate = feed["per_cpu_s"]  # one thread; the clock counts what others took of the core, too
        rows.append(
            (
                "feed apply in a replica, entries of 64",
                ">= 2 M block mutations/s",
                f"{rate / 1e6:.2f} M per second of CPU",
                _verdict(rate >= 2e6),
            )
        )
        private = inside["memory"]["private"]["bytes_per_entry"]
        shared = inside["memory"]["shared_64"]["bytes_per_entry"]
        rows.append(
            (
                "bytes per (worker, block), private / shared by 64 workers",
                "<= 50 / <= 2",
                f"{private} / {shared}",
                _verdict(private <= 50 and shared <= 2),
            )
        )
    rows += _ingest_targets(results.get("ingest")) + _bootstrap_targets(results.get("bootstrap"))
    return rows + _gateway_targets(results.get("gateway"))


def _ingest_targets(ingest: dict[str, Any] | None) -> list[Row]:
    if not ingest:
        return []
    rate = ingest["events_of_64"]["kvindexd"]["blocks_per_s"]
    peer = ingest["events_of_64"].get("peer")
    beside = f" (the peer: {peer['blocks_per_s'] / 1e3:.0f} k/s)" if peer else ""
    seen = ingest["visible_at_20000"]
    return [
        (
            "one ingester, ZMQ to store, 64-block events",
            ">= 250 k blocks/s",
            f"{rate / 1e3:.0f} k/s{beside}",
            _verdict(rate >= 250_000),
        ),
        (
            "event published to visible in a replica, at 20 k blocks/s",
            "p50 <= 5 ms, p99 <= 25 ms",
            f"{seen['p50_ms']} / {seen['p99_ms']} ms",
            _verdict(seen["p50_ms"] <= 5 and seen["p99_ms"] <= 25),
        ),
    ]


def _bootstrap_targets(boot: dict[str, Any] | None) -> list[Row]:
    row = (boot or {}).get("6400000_shared_by_8")
    if row is None:
        return []
    met = row["seconds"] <= 30 and row["peak_over_final"] < 2
    return [
        (
            "bootstrap of 6.4 M entries",
            "completes, <= 30 s, memory overhead < 2x",
            f"{row['seconds']} s ({row['cpu_s']} s of CPU), peak {row['peak_over_final']}x",
            _verdict(met),
        )
    ]


def _gateway_targets(gateway: dict[str, Any] | None) -> list[Row]:
    rows = (gateway or {}).get("rows", [])
    if not rows:
        return []
    total = sum(row["requests"] for row in rows)
    failed = {f"{r['case']}, {r['way']}": sum(r["errors"].values()) for r in rows}
    missed = {f"{r['case']}, {r['way']}": r.get("without_pick", 0) for r in rows}
    out: list[Row] = []
    for what, found in (("failed", failed), ("gone on without a pick", missed)):
        wrong = {k: v for k, v in found.items() if v}
        where = f" ({_flat(wrong)})" if wrong else ""
        measured = f"{sum(wrong.values())} of {total}{where}"
        out.append((f"through Envoy: requests {what}", "none", measured, _verdict(not wrong)))
    return out


def _gateway_section(gateway: dict[str, Any] | None) -> list[str]:
    if not gateway:
        return []
    head = ["load", "way", "requests", "errors", "no pick", "by cache", "at the holder", "per s"]
    head += ["p50 ms", "p99 ms", "added p50", "added p99", "first byte p50"]
    head += ["kvindexd CPU us", "Envoy CPU us"]
    out = ["## gateway: requests through a real Envoy", "", f"{_flat(gateway['setup'])}", ""]
    out += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in gateway["rows"]:
        by = r.get("by", {})
        cells = [r["case"], r["way"], r["requests"], sum(r["errors"].values())]
        cells += [r.get("without_pick", ""), by.get("cache", 0) if by else "", r["at_home"]]
        cells += [r["per_second"], r["p50_ms"], r["p99_ms"], r.get("added_p50_ms", "")]
        cells += [r.get("added_p99_ms", ""), r["first_byte_p50_ms"]]
        cells += [r.get("picker_cpu_us", ""), r["envoy_cpu_us"]]
        out.append(f"| {' | '.join(map(str, cells))} |")
    return [*out, ""]


def markdown(results: dict[str, Any]) -> str:
    """The whole run."""
    m = results["machine"]
    lines = [
        f"# {'Quick' if results['quick'] else 'Full'} run of {m['date']}",
        "",
        f"kvindexd {results['kvindexd']}, peer {results['peer'] or 'not measured'}; "
        f"{m['cores']} cores, {m['cpu']}, load average {m['load_average']} at the start; "
        f"Python {m['python']}, " + ", ".join(f"{k} {v}" for k, v in m["packages"].items()),
        "",
        "| what | target | measured | |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in targets(results)),
        "",
    ]
    for suite in ("queries", "busy"):
        if results.get(suite):
            lines += [f"## {suite}: microseconds per query", "", *_query_table(results[suite]), ""]
    lines += _gateway_section(results.get("gateway"))
    for suite in ("ingest", "bootstrap", "trace", "inprocess"):
        found = results.get(suite)
        if found:
            lines += [f"## {suite}", "", "| what | figures |", "|---|---|"]
            for name, value in found.items():
                lines.append(f"| {name} | {_flat(value)} |")
            lines.append("")
    return "\n".join(lines)


def _query_table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["case", "p50", "p99", "CPU", "calls/s", "peer p50", "peer p99", "peer CPU"]
    head += ["p50 ratio", "CPU ratio"]
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        cells = [r["case"]]
        for side in ("kvindexd", "peer"):
            got = r.get(side)
            cells += [f"{got[k]:.0f}" if got else "" for k in ("p50", "p99", "cpu_us")]
            if side == "kvindexd":
                cells.append(f"{got['per_second']:.0f}" if got else "")
        cells += [str(r.get("p50_ratio", "")), str(r.get("cpu_us_ratio", ""))]
        out.append(f"| {' | '.join(cells)} |")
    return out


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{k}: ({_flat(v)})" if isinstance(v, dict) else f"{k} {v}" for k, v in value.items()
        )
    return str(value)
