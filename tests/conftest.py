"""Fixtures that several test modules share; servers themselves are in servers.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import servers
import structlog

SERVERS = ["valkey", "redis"]
# Further binaries to run the store's tests against, such as an old Redis, by full path.
SERVERS += os.environ.get("KVINDEXD_TEST_SERVERS", "").split()


@pytest.fixture(scope="session", autouse=True)
def nobody_else(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test asks a daemon, or reads a store, that somebody runs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVINDEXD_SERVER", "127.0.0.1:1")
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data-home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Test processes in the background ignore SIGINT, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A command that ran in this process has set logging up, for a stream that is closed by now."""
    yield
    structlog.reset_defaults()


def binary_of(name: str) -> str:
    """The server binary behind a fixture parameter."""
    known = {"valkey": lambda: servers.VALKEY, "redis": servers.redis_binary}
    return known[name]() if name in known else name


@pytest.fixture(scope="session", params=SERVERS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    """One server per kind for the whole session; `redis_server` empties it for each test."""
    with servers.server(binary_of(request.param)) as s:
        yield s


@pytest.fixture
def redis_server(shared_server: servers.Server) -> servers.Server:
    """An empty server of each kind in turn."""
    shared_server("FLUSHALL")
    shared_server("CONFIG", "SET", "maxmemory", "0")
    shared_server("CONFIG", "SET", "maxmemory-policy", "noeviction")
    return shared_server


@pytest.fixture
def redis_url(redis_server: servers.Server) -> str:
    """URL of an empty server of each kind in turn."""
    return redis_server.url
