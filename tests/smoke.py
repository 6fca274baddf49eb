"""An installed kvindexd, as a user first meets it: version, help, a daemon that starts and ends.

    python tests/smoke.py VENV/bin

Uses nothing but the standard library and what VENV/bin has. Exits with 1 and a message otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path


def say(command: Path, *arguments: str) -> str:
    """Run a command that must succeed; its output."""
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"{command.name} {' '.join(arguments)}: status {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def serve(command: Path, folder: str) -> None:
    """Start `serve` with its embedded store, register a worker through the command line, stop."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
    environment |= {
        "KVINDEXD_SERVER__LISTEN": "127.0.0.1:0",
        "KVINDEXD_METRICS__LISTEN": "127.0.0.1:0",
        "KVINDEXD_EXT_PROC__LISTEN": "127.0.0.1:0",
        "KVINDEXD_INDEX__DATA_DIR": folder,
        "KVINDEXD_LOG__FORMAT": "json",
    }
    daemon = subprocess.Popen(
        [command, "serve"], env=environment, stderr=subprocess.PIPE, text=True
    )
    timer = threading.Timer(60, daemon.kill)
    timer.start()
    try:
        address = next((r["grpc"] for r in records(daemon) if r.get("event") == "ready"), "")
        if not address:
            sys.exit("serve: it ended, or said nothing for 60 s, before it was ready")
        threading.Thread(target=lambda: list(daemon.stderr or ()), daemon=True).start()
        server = ("--server", address)
        worker = (
            "--model",
            "m",
            "--address",
            "127.0.0.1:1",
            "--kv-events-endpoint",
            "tcp://127.0.0.1:2",
        )
        say(command, "workers", "add", "w0", *worker, *server)
        listed = json.loads(say(command, "workers", "list", "--json", *server))
        if [w["worker_id"] for w in listed["workers"]] != ["w0"]:
            sys.exit(f"workers list: {listed}")
        daemon.send_signal(signal.SIGTERM)
        if status := daemon.wait(30):
            sys.exit(f"serve: status {status} after SIGTERM")
    finally:
        timer.cancel()
        daemon.kill()


def records(daemon: subprocess.Popen[str]) -> list[dict[str, str]]:
    """What it logged up to its ready line."""
    out: list[dict[str, str]] = []
    for line in daemon.stderr or ():
        out.append(json.loads(line) if line.startswith("{") else {})
        if out[-1].get("event") == "ready":
            break
    return out


def main() -> None:
    """All of it."""
    command = Path(sys.argv[1]) / "kvindexd"
    version = say(command, "--version")
    say(command, "--help")
    say(command, "config", "show")
    with tempfile.TemporaryDirectory() as folder:
        serve(command, folder)
    print(f"{version}: installs, starts, answers and stops")


if __name__ == "__main__":
    main()
