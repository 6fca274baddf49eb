"""The embedded Valkey: started, adopted, restarted, refused; real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import servers

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import Store, StoreError, StoreOptions
from kvindexd.store.embedded import EmbeddedServer

KEY = WorkerKey("", "w0", 0)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def write(url: str, seq: int) -> int:
    """Write one batch; how many records are there then."""
    async with Store(url, StoreOptions(deadline=10)) as store:
        await store.register(KEY, b"r", False, 0.0)
        lease = await store.acquire(KEY, "me", 60_000)
        delta = BatchDelta(seq=seq, ts=0.0, digest=0, blocks={b"%d" % seq: b"x"})
        await store.apply(lease, [delta])
        return (await store.size_of(KEY)).blocks


async def test_data_survives_stop_and_start(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    for n in range(1, 4):
        await server.start()
        assert not server.adopted
        assert await write(server.url, n) == n
        pid = server.pid
        await server.stop()
        assert not alive(pid)
    await server.stop()


async def test_no_port_is_opened_and_nobody_else_may_connect(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    await server.start()
    try:
        raw = servers.Raw(path=str(tmp_path / "data" / "valkey.sock"))
        assert raw("CONFIG", "GET", "port")[1] == b"0"
        assert raw("CONFIG", "GET", "maxmemory-policy")[1] == b"noeviction"
        assert raw("CONFIG", "GET", "appendonly")[1] == b"yes"
        assert raw("CONFIG", "GET", "appendfsync")[1] == b"everysec"
        assert not sockets_of(server.pid)
        raw.close()
        mode = (tmp_path / "data" / "valkey.sock").stat().st_mode & 0o777
        assert mode == 0o700
        assert (tmp_path / "data").stat().st_mode & 0o077 == 0
    finally:
        await server.stop()


def sockets_of(pid: int) -> list[str]:
    """Listening TCP sockets of a process."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


OWNER = """
import asyncio, pathlib, sys
from kvindexd.store.embedded import EmbeddedServer
async def main():
    s = EmbeddedServer(pathlib.Path(sys.argv[1]))
    await s.start()
    print(s.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def owner_process(folder: Path) -> subprocess.Popen[str]:
    """A process that starts the server, prints its pid and waits."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_a_server_left_behind_is_adopted_with_its_data(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    child = owner_process(folder)
    assert child.stdout is not None
    server = EmbeddedServer(folder)
    try:
        line = ""
        while not line.strip().isdigit():
            line = await asyncio.to_thread(child.stdout.readline)
            assert line, "the child ended"
        pid = int(line)
        await write(server.url, 0)
        with pytest.raises(StoreError, match="in use by another kvindexd"):
            await EmbeddedServer(folder).start()
        child.send_signal(signal.SIGKILL)
        await asyncio.to_thread(child.wait)
        assert alive(pid)
        await server.start()
        assert server.adopted
        assert server.pid == pid
        assert await write(server.url, 1) == 2
        # An adopted server is stopped with us, too, and watched over.
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while server.pid == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await write(server.url, 2) >= 1
        pid = server.pid
        await server.stop()
        assert not alive(pid)
    finally:
        child.kill()
        await server.stop()


async def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data")
    await server.start()
    try:
        async with Store(server.url, StoreOptions(deadline=20)) as store:
            await store.register(KEY, b"r", False, 0.0)
            first = server.pid
            await asyncio.sleep(1.2)  # the append-only file is synced every second
            os.kill(first, signal.SIGKILL)
            assert (await store.get_worker(KEY)).registration == b"r"
            assert server.pid != first
            assert (await store.verify()).changed == (0,)
    finally:
        await server.stop()


async def test_a_stranger_on_the_socket_is_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    args = ("--unixsocket", str(folder / "valkey.sock"), "--save", "")
    with servers.start_valkey(*args) as stranger:
        with pytest.raises(StoreError, match=f"pid {stranger.pid} answers.*not ours"):
            await EmbeddedServer(folder).start()
        assert alive(stranger.pid)


async def test_a_dead_socket_and_a_reused_pid_are_in_nobodys_way(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "valkey.sock"))
    left.close()
    (folder / "valkey.pid").write_text(str(os.getpid()))
    server = EmbeddedServer(folder)
    await server.start()
    assert not server.adopted
    await server.stop()
    assert alive(os.getpid())


async def test_two_on_one_folder_are_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first, second = EmbeddedServer(tmp_path / "d"), EmbeddedServer(tmp_path / "d")
    await first.start()
    try:
        with pytest.raises(StoreError, match="in use by another kvindexd"):
            await second.start()
        await second.stop()
        assert await write(first.url, 0) == 1
    finally:
        await first.stop()
    await second.start()
    await second.stop()


async def test_a_truncated_append_only_file_still_starts(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "d")
    await server.start()
    for n in range(5):
        await write(server.url, n)
    await server.stop()
    (log,) = (tmp_path / "d" / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 7)
    await server.start()
    try:
        assert await write(server.url, 9) >= 5
    finally:
        await server.stop()


async def test_a_broken_file_is_reported_with_the_servers_own_words(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "d")
    await server.start()
    await write(server.url, 0)
    await server.stop()
    (log,) = (tmp_path / "d" / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"nonsense\r\n" + log.read_bytes())
    with pytest.raises(StoreError, match=r"did not start.*Bad file format"):
        await server.start()
    assert server.pid == 0


async def test_a_long_path_works_all_the_same(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("x" * 120) / "data")
    await server.start()
    try:
        assert await write(server.url, 0) == 1
    finally:
        await server.stop()


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"data folder .*file/data.*set index\.data_dir"):
        await EmbeddedServer(tmp_path / "file" / "data").start()


async def test_cancelling_the_start_leaves_no_server(tmp_path: Path) -> None:
    for delay in (0.0, 0.01, 0.05):
        server = EmbeddedServer(tmp_path / "d")
        task = asyncio.create_task(server.start())
        await asyncio.sleep(delay)
        pid = server.pid
        task.cancel()
        await asyncio.wait([task])
        assert server.pid == 0 or not task.cancelled()
        await server.stop()
        assert not pid or not alive(pid)
