"""A TCP proxy that delays, holds back or cuts what a server answers."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class Proxy:
    """Between a client and a loopback port.

    `lose_requests`: so many requests are cut off before they reach the server.

    `delay`: seconds before replies are passed on. `lose_replies`: requests reach the server, and
    at its reply the connection is cut instead: the client cannot know that it was heard.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.delay = 0.0
        self.lose_replies = 0
        self.lose_requests = 0
        self.connections = 0
        self.lost = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._requests(reader, up_writer))
                    group.create_task(self._replies(up_reader, writer))
            except* OSError:
                pass
            finally:
                writer.close()
                up_writer.close()

    async def _requests(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if self.lose_requests:
                self.lose_requests -= 1
                break
            to.write(data)
            await to.drain()
        raise ConnectionResetError

    async def _replies(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if self.lose_replies:
                self.lose_replies -= 1
                self.lost += 1
                raise ConnectionResetError
            await asyncio.sleep(self.delay)
            to.write(data)
            await to.drain()
        raise ConnectionResetError
