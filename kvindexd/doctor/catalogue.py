"""All checks, in the order in which they are told."""

from __future__ import annotations

from kvindexd.doctor import (
    check_envoy,
    check_fleet,
    check_server,
    check_settings,
    check_store,
    check_wire,
    check_workers,
)

_MODULES = (
    check_server,
    check_workers,
    check_wire,
    check_fleet,
    check_store,
    check_settings,
    check_envoy,
)
CHECKS = tuple(check for module in _MODULES for check in module.book.checks)
"""Each id is there once."""


def table() -> str:
    """The checks as the Markdown table of docs/doctor.md."""
    lines = [
        "| id | severity | what provokes it | cost | fix |",
        "|---|---|---|---|---|",
    ]
    for c in CHECKS:
        cells = (f"`{c.id}`", c.severity.value, c.provoked, c.cost, c.fix)
        lines.append("| " + " | ".join(t.replace("|", "\\|") for t in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
