"""ZeroMQ in an asyncio program: endpoints checked, readiness awaited, receives never awaited.

A cancelled asyncio receive can lose the message it was about to return, so nothing here awaits a
receive: the loop waits for readiness, which may be cancelled at any time, and then takes what is
there without blocking.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import zmq

_WATCHDOG = 1.0
"""Seconds after which readiness is looked at anew although nothing woke us."""

_TCP = re.compile(r"^tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:\[\]/\s]+):(?P<port>\d{1,5}|\*)$")
_IPC = re.compile(r"^ipc://.+$")


class TransportError(ValueError):
    """An endpoint that cannot be used: what is wrong with it and what to write instead."""


def check_endpoint(endpoint: str, *, bind: bool = False) -> str:
    """Return the endpoint without surrounding blanks.

    Raises TransportError unless it is `tcp://host:port` (IPv6 hosts in brackets) or `ipc://path`
    and can be connected to, or bound with `bind`.
    """
    endpoint = endpoint.strip()
    if _IPC.match(endpoint):
        return endpoint
    match = _TCP.match(endpoint)
    if match is None:
        raise TransportError(
            f"endpoint {endpoint!r}: expected tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH"
        )
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:
        raise TransportError(f"endpoint {endpoint!r}: port {port} is above 65535")
    if not bind and host == "*":
        raise TransportError(
            f"endpoint {endpoint!r}: '*' is every interface of the engine's host and cannot be "
            "connected to; write that host's name, or set bind_events if the engine connects to us"
        )
    if not bind and port in ("*", "0"):
        raise TransportError(f"endpoint {endpoint!r}: a port is needed to connect to")
    return endpoint


def is_ipv6(endpoint: str) -> bool:
    """Whether the host is an IPv6 literal, which needs the socket's IPv6 option."""
    return endpoint.startswith("tcp://[")


def new_context(max_sockets: int = 16384) -> zmq.Context[zmq.Socket[bytes]]:
    """One context for all sockets of a process; a rank needs four sockets at most."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.max_sockets = max_sockets
    return context


def _ready(sockets: Sequence[zmq.Socket[bytes]], events: int) -> bool:
    # Asking for EVENTS also re-arms the socket's file descriptor, so all of them are asked.
    ready = 0
    for socket in sockets:
        ready |= int(socket.getsockopt(zmq.EVENTS)) & events
    return bool(ready)


async def wait_readable(sockets: Sequence[zmq.Socket[bytes]], within: float | None) -> bool:
    """Wait until one of the sockets has a message; False if none comes `within` seconds.

    Cancellation is safe: nothing is received here. Always yields to the loop once.
    """
    return await _wait(sockets, within, zmq.POLLIN)


async def wait_writable(socket: zmq.Socket[bytes], within: float) -> bool:
    """Wait until a message can be sent, which with zmq.IMMEDIATE means: until it is connected."""
    return await _wait((socket,), within, zmq.POLLOUT)


async def _wait(sockets: Sequence[zmq.Socket[bytes]], within: float | None, events: int) -> bool:
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    deadline = None if within is None else loop.time() + within
    while not _ready(sockets, events):
        left = _WATCHDOG if deadline is None else min(_WATCHDOG, deadline - loop.time())
        if left <= 0:
            return False
        await _wait_for_signal(loop, sockets, left)
    return True


async def _wait_for_signal(
    loop: asyncio.AbstractEventLoop, sockets: Sequence[zmq.Socket[bytes]], within: float
) -> None:
    """Until a descriptor signals; armed only while somebody waits, or the loop would spin."""
    signal = asyncio.Event()
    descriptors = [int(s.getsockopt(zmq.FD)) for s in sockets]
    for fd in descriptors:
        loop.add_reader(fd, signal.set)
    try:
        async with asyncio.timeout(within):
            await signal.wait()
    except TimeoutError:
        pass
    finally:
        for fd in descriptors:
            loop.remove_reader(fd)


def take(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """One whole message if one is waiting, else None. All parts of a message arrive together."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
