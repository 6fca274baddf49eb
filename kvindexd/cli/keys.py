"""Key presses of a terminal, one by one, while something else goes on."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator

_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    " ": "space",
    "\x03": "ctrl-c",
    "\x04": "q",
}


def split(typed: str) -> list[str]:
    """What was typed as key names: a letter, or up, down, left, right, enter, escape, space."""
    keys = []
    while typed:
        size = 3 if typed[:3] in _NAMES else 1
        head, typed = typed[:size], typed[size:]
        keys.append(_NAMES.get(head, head))
    return keys


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], list[str]]]:
    """Yields `read(seconds)`: the keys pressed within that time, at once when there are any.

    Standard input must be a terminal; it is set back at the end.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read(seconds: float) -> list[str]:
        ready, _, _ = select.select([fd], [], [], max(0.0, seconds))
        return split(os.read(fd, 1024).decode(errors="replace")) if ready else []

    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
