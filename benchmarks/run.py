"""The benchmark suite: everything in one run, as a table and as JSON under benchmarks/results/.

    python -m benchmarks.run [--quick] [--only SUITE ...] [--no-peer] [--out FOLDER]

Whatever listens or connects does so in a network namespace of its own that has nothing but
loopback: the peer listens on every interface and has no option against it. Without the right to
make such a namespace kvindexd is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import bootstrap, gateway, ingest, inprocess, queries, report, trace
from benchmarks.measure import machine
from benchmarks.queries import Case
from benchmarks.sides import PEER_PACKAGE, Ours, Peer, Side, only_loopback, peer_python
from kvindexd._version import __version__

_INSIDE = "KVINDEXD_BENCH_NAMESPACE"
RESULTS = Path(__file__).parent / "results"
SUITES = ("inprocess", "queries", "ingest", "bootstrap", "trace", "gateway")
WITH_PEER = {"queries", "ingest", "busy"}


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


def enter_namespace(peer: str | None) -> None:
    """Run this program again where there is only loopback; returns if that cannot be had."""
    if os.environ.get(_INSIDE) or only_loopback():
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e:
        say(f"no network namespace of our own ({e}): kvindexd is measured alone")
        return
    environment = os.environ | {_INSIDE: "1", "KVINDEXD_BENCH_PEER": peer or ""}
    command = 'ip link set lo up && exec "$@"'
    program = [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]]
    os.execvpe("unshare", [*unshare, "sh", "-c", command, "sh", *program], environment)


def cases(quick: bool) -> list[Case]:
    """What is asked of both sides."""
    main = [
        Case(64, 1000),
        Case(64, 1000, by="hashes"),
        Case(64, 1000, by="batches"),
        Case(64, 1000, "graded"),
        Case(64, 1000, "miss"),
    ]
    if quick:
        return [*main, Case(8, 100), Case(1, 10)]
    more = [Case(64, 1000, connections=2), Case(64, 1000, connections=8)]
    more += [Case(64, 1000, by="hashes", connections=8)]
    more += [Case(r, 1000) for r in (1, 8, 512)]
    more += [Case(64, b) for b in (10, 100, 8000)]
    more += [Case(64, b, by="hashes") for b in (10, 100)]
    return main + more


def measure(args: argparse.Namespace, peer: str | None) -> dict[str, Any]:
    """All chosen suites."""
    out: dict[str, Any] = {"quick": args.quick, "kvindexd": __version__, "machine": machine()}
    out["peer"] = PEER_PACKAGE if peer else None

    def sides() -> list[Side]:
        return [Ours(), Peer(peer)] if peer else [Ours()]

    suites: dict[str, Callable[[], Any]] = {
        "inprocess": lambda: inprocess.run(quick=args.quick, say=say),
        "bootstrap": lambda: bootstrap.run(quick=args.quick, say=say),
        "trace": lambda: trace.run(quick=args.quick, say=say),
        "ingest": lambda: ingest.run(peer, quick=args.quick, say=say),
        "queries": lambda: queries.run(cases(args.quick), sides, quick=args.quick, say=say),
        "gateway": lambda: gateway.run(quick=args.quick, say=say),
    }
    if not args.quick and not args.no_busy:
        suites["busy"] = lambda: queries.run_busy(sides, say=say)
    for name in args.only or suites:
        say(f"-- {name}")
        out[name] = suites[name]()
        save(args, out)  # what is done stays, should a later suite fail
    return out


def save(args: argparse.Namespace, results: dict[str, Any]) -> str:
    """Write the results so far; the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    stamp = results["machine"]["date"].replace(":", "").split("+")[0]
    name = f"{stamp}-{'quick' if args.quick else 'full'}"
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    table = report.markdown(results)
    (args.out / f"{name}.md").write_text(table)
    return table


def main() -> None:
    """See the module's head."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: kvindexd bench --quick")
    parser.add_argument("--quick", action="store_true", help="under three minutes, smaller sizes")
    parser.add_argument("--only", nargs="+", choices=[*SUITES, "busy"], metavar="SUITE")
    parser.add_argument("--no-peer", action="store_true", help="measure kvindexd alone")
    parser.add_argument("--no-busy", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    peer = os.environ.get("KVINDEXD_BENCH_PEER") or None
    if not os.environ.get(_INSIDE):
        compared = not args.only or WITH_PEER.intersection(args.only)
        wanted = compared and not args.no_peer and shutil.which("unshare") is not None
        peer = peer_python() if wanted else None
        if wanted and peer is None:
            say(f"the peer ({PEER_PACKAGE}) could not be installed: kvindexd is measured alone")
        enter_namespace(peer)
    if peer is not None and not only_loopback():
        peer = None
    say("\n" + save(args, measure(args, peer)))


if __name__ == "__main__":
    main()
