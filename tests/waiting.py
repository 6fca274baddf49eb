"""Waiting for conditions that change without telling, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], what: str, deadline: float = 20.0) -> Any:
    """What a condition gives once that is true."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {deadline} s")


async def becomes(condition: Callable[[], Any], what: str = "", deadline: float = 10.0) -> None:
    """Until a condition is true, for tests in an event loop."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{what or condition}: not within {deadline} s"
        await asyncio.sleep(0.005)
