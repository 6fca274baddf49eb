"""Where registrations may lead, how large they may be, and the one function that registers."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import servers

from kvindexd.ingest.engine_metrics import EngineMetricsError, read_page
from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.supervisor import Supervisor
from kvindexd.registering import Registrar, Sizes, TooManyWorkers, register
from kvindexd.registration import InvalidRegistration, Registration, decode
from kvindexd.security.gate import Gate, Unresolved
from kvindexd.security.networks import Forbidden, NetworkPolicy, place_of
from kvindexd.store import Store
from kvindexd.store.errors import Changed, NotRegistered
from kvindexd.telemetry import Metrics
from kvindexd.testing.engine import FakeEngine
from kvindexd.tokens.http import HttpClient, HttpError

WIDE = ("0.0.0.0/0", "::/0")


@pytest.mark.parametrize(
    ("allow", "address", "said"),
    [
        ((), "169.254.169.254", ""),
        (("10.8.0.0/16",), "10.8.3.4", ""),
        (("10.8.0.0/16",), "10.8.255.255", ""),
        (("10.8.0.0/16",), "10.9.0.0", "outside"),
        (("10.8.0.0/16",), "10.7.255.255", "outside"),
        (("10.8.0.0/16",), "fd00::1", "outside"),
        (("fd00:8::/32",), "fd00:8::1", ""),
        (WIDE, "8.8.8.8", ""),
        (WIDE, "169.254.169.254", "metadata"),
        (WIDE, "fd00:ec2::254", "metadata"),
        (WIDE, "100.100.100.200", "metadata"),
        (WIDE, "169.254.1.1", "link-local"),
        (WIDE, "fe80::1", "link-local"),
        (WIDE, "127.0.0.1", "loopback"),
        (WIDE, "::1", "loopback"),
        (WIDE, "0.0.0.0", "unspecified"),
        (WIDE, "::", "unspecified"),
        (WIDE, "224.0.0.1", "multicast"),
        (WIDE, "255.255.255.255", "broadcast"),
        (WIDE, "::ffff:169.254.169.254", "metadata"),
        (WIDE, "::ffff:127.0.0.1", "loopback"),
        (WIDE, "64:ff9b::a9fe:a9fe", "metadata"),
        (WIDE, "2002:7f00:1::", "loopback"),
        (("127.0.0.0/8",), "127.0.0.1", ""),
        (("127.0.0.0/8",), "::ffff:127.0.0.1", ""),
        (("127.0.0.1/32",), "127.0.0.2", "loopback"),
        (("169.254.0.0/16",), "169.254.7.7", ""),
        (("169.254.0.0/16",), "169.254.169.254", "metadata"),
        (("169.254.169.254/32",), "169.254.169.254", ""),
    ],
)
def test_networks(allow: Sequence[str], address: str, said: str) -> None:
    policy = NetworkPolicy(allow)
    if said:
        with pytest.raises(Forbidden, match=said):
            policy.check_address(ipaddress.ip_address(address))
    else:
        policy.check_address(ipaddress.ip_address(address))


def test_places() -> None:
    assert place_of("tcp://10.0.0.1:5557") == ("10.0.0.1", 5557)
    assert place_of("tcp://[fd00::1]:5557") == ("fd00::1", 5557)
    assert place_of("host.test:8000") == ("host.test", 8000)
    assert place_of("[fd00::1]:8000") == ("fd00::1", 8000)
    assert place_of("http://h:1/x") == ("h", 1)
    assert place_of("host") == ("host", 0)
    assert place_of("fd00::1") == ("fd00::1", 0)
    assert place_of("https://h:1") == ("h", 1)
    assert place_of("tcp://user@h:1") == ("h", 1)
    assert place_of("ipc:///run/x") is place_of("tcp://h:99999") is place_of("") is None


def _registration(**fields: Any) -> Registration:
    given = {
        "worker_id": "w",
        "model": "m",
        "address": "127.0.0.1:8000",
        "kv_events_endpoint": "tcp://127.0.0.1:5557",
    }
    return Registration(**(given | fields))


LOOPBACK = NetworkPolicy(["127.0.0.0/8"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"kv_events_endpoint": "tcp://localhost:5557"}, ""),
        ({"kv_events_endpoint": "tcp://169.254.169.254:80"}, "kv_events_endpoint: .*metadata"),
        ({"kv_events_endpoint": "tcp://[::ffff:169.254.169.254]:80"}, "metadata"),
        ({"kv_events_endpoint": "tcp://2852039166:80"}, "metadata"),
        ({"kv_events_endpoint": "tcp://0xa9fea9fe:80"}, "metadata"),
        ({"replay_endpoint": "tcp://10.0.0.1:6379"}, "replay_endpoint: .*outside"),
        ({"address": "10.0.0.1:8000"}, "address: .*outside"),
        ({"address": "http://10.0.0.1:8000"}, "address: .*outside"),
        ({"address": "https://10.0.0.1:8000"}, "address: .*outside"),
        ({"address": "fd00::1"}, "address: .*outside"),
        ({"address": "10.0.0.1:99999"}, "address: .*expected HOST:PORT"),
        ({"address": "pod-without-a-port"}, ""),
        ({"address": "later.invalid:8000"}, ""),
        ({"aliases": ("w.test", "10.0.0.1:8000")}, "aliases: .*outside"),
        ({"kv_events_endpoint": "ipc:///run/engine"}, "ipc:// needs registration.allow_ipc"),
        ({"kv_events_endpoint": "inproc://x"}, "only tcp://"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:99999"}, "expected tcp://HOST:PORT"),
        ({"kv_events_endpoint": "tcp://*:5557", "bind_events": True}, ""),
        ({"kv_events_endpoint": "tcp://later.invalid:5557"}, ""),
    ],
)
async def test_where_a_registration_may_lead(fields: dict[str, Any], said: str) -> None:
    refused: list[str] = []
    gate = Gate(LOOPBACK, refused=refused.append)
    registration = _registration(**fields)
    if not said:
        await gate.check(registration)
        assert refused == []
        return
    with pytest.raises(Forbidden, match=said):
        await gate.check(registration)
    assert len(refused) == 1
    await Gate().check(registration)  # without networks nothing is restricted


async def test_endpoints_are_pinned_to_addresses_that_were_checked() -> None:
    gate = Gate(LOOPBACK)
    assert await gate.endpoint("tcp://localhost:5557", "events") == "tcp://127.0.0.1:5557"
    with pytest.raises(Unresolved, match="is not resolved"):
        await gate.endpoint("tcp://later.invalid:5557", "events")
    assert await Gate().endpoint("tcp://localhost:5557", "events") == "tcp://localhost:5557"
    for odd in ("tcp://10.0.0.1#@127.0.0.1:1", "tcp://127.0.0.1@10.0.0.1:1"):
        with pytest.raises(Forbidden, match=r"10\.0\.0\.1 is outside"):
            await gate.endpoint(odd, "events")
    scoped = Gate(NetworkPolicy(["fe80::/10"]))
    assert await scoped.endpoint("tcp://[fe80::1%eth0]:1", "events") == "tcp://[fe80::1%eth0]:1"
    with pytest.raises(Forbidden, match=r"address: 10\.0\.0\.1 is outside"):
        await gate.endpoints(_registration(address="10.0.0.1:8000"))
    allowed = Gate(NetworkPolicy(["127.0.0.0/8"], allow_ipc=True))
    assert await allowed.endpoint("ipc:///run/engine", "events") == "ipc:///run/engine"


async def test_a_name_that_changes_its_address_is_checked_anew() -> None:
    answers = {"engine.test": ["127.0.0.7"]}

    async def lookup(host: str) -> list[str]:
        return answers[host]

    gate = Gate(LOOPBACK, lookup=lookup)
    assert (await gate.endpoints(_registration(kv_events_endpoint="tcp://engine.test:1"))) == (
        "tcp://127.0.0.7:1",
        "",
    )
    answers["engine.test"] = ["169.254.169.254"]
    with pytest.raises(Forbidden, match=r"'engine\.test': 169\.254\.169\.254 is"):
        await gate.host("engine.test")
    answers["engine.test"] = ["10.0.0.1", "127.0.0.9"]
    assert await gate.host("engine.test") == "127.0.0.9"


class _Record:
    def __init__(self, registration: bytes) -> None:
        self.registration = registration


class _Store:
    """A registry in memory; `meanwhile` runs between the look and the write, once."""

    def __init__(self, meanwhile: Callable[[_Store], None] = lambda _: None) -> None:
        self.raw = b""
        self.writes: list[bool] = []
        self._meanwhile = meanwhile

    async def get_worker(self, _key: Any) -> Any:
        if not self.raw:
            raise NotRegistered("no")
        return _Record(self.raw)

    async def register(
        self, _key: Any, raw: bytes, replaced: bool, _now: float, instead_of: bytes | None = None
    ) -> Any:
        meanwhile, self._meanwhile = self._meanwhile, lambda _: None
        meanwhile(self)
        if instead_of != self.raw:
            raise Changed("another")
        self.raw = raw
        self.writes.append(replaced)


async def test_an_engine_that_moves_to_another_address_is_followed() -> None:
    answers = {"engine.test": ["127.0.0.1"]}

    async def lookup(host: str) -> list[str]:
        return answers[host]

    settings = IngestSettings(owner="me", heartbeat=0.1, lease_ttl=2.0)
    with servers.start_valkey() as redis, FakeEngine(replay_port=None) as first:
        port = first.endpoint().rpartition(":")[2]
        wanted = _registration(kv_events_endpoint=f"tcp://engine.test:{port}")
        async with Store(redis.url) as store:
            gate = Gate(LOOPBACK, lookup=lookup)
            supervisor = Supervisor(store, settings, Metrics(), gate)
            running = asyncio.create_task(supervisor.run())
            await register(store, wanted)
            supervisor.set_rank(wanted)
            await asyncio.to_thread(first.wait_subscribed)
            first.stop()
            answers["engine.test"] = ["127.0.0.2"]
            with FakeEngine(host="127.0.0.2", port=int(port), replay_port=None) as second:
                await asyncio.to_thread(second.wait_subscribed)
            # What the store keeps is the name.
            record = await store.get_worker(wanted.key)
            assert decode(record.registration) == wanted
            running.cancel()
            await asyncio.wait((running,))


async def test_pages_and_tokenizers_of_engines_are_asked_where_they_may_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as page:
        page.setblocking(False)
        port = page.getsockname()[1]
        gate = Gate(NetworkPolicy(["10.8.0.0/16"]))
        with pytest.raises(EngineMetricsError, match=r"127\.0\.0\.1 is loopback"):
            await read_page(f"127.0.0.1:{port}", "/metrics", 5.0, gate)
        client = HttpClient(gate.host)
        with pytest.raises(HttpError, match=r"'localhost': .* is loopback"):
            await client.post(f"http://localhost:{port}/tokenize", b"{}")
        await client.close()
        with pytest.raises(BlockingIOError):
            page.accept()


async def test_one_function_registers() -> None:
    store, wanted = _Store(), _registration()
    outcomes = [
        await register(store, wanted),
        await register(store, wanted),
        await register(store, _registration(labels={"a": "b"})),
        await register(store, _registration(address="127.0.0.1:9")),
        await register(store, wanted, restoring=True),
    ]
    assert [o.value for o in outcomes] == ["added", "unchanged", "updated", "replaced", "kept"]
    assert store.writes == [False, False, True]
    store.raw = b"\xc1 unreadable"
    assert (await register(store, wanted)).value == "replaced"


async def test_who_registers_meanwhile_is_seen() -> None:
    other = _registration(address="127.0.0.1:9").encode()
    store = _Store(lambda s: setattr(s, "raw", other))
    assert (await register(store, _registration())).value == "replaced"
    store = _Store(lambda s: setattr(s, "raw", other))
    assert (await register(store, _registration(), restoring=True)).value == "kept"
    assert store.raw == other


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"labels": {str(i): "" for i in range(4)}}, ""),
        (
            {"labels": {str(i): "" for i in range(5)}},
            "labels: 5 of them, at most limits",
        ),
        ({"aliases": tuple("abcd")}, ""),
        ({"aliases": tuple("abcde")}, "aliases: 5 of them"),
        ({"worker_id": "w" * 32}, ""),
        ({"worker_id": "w" * 33}, "worker_id: a text of 33 bytes"),
        ({"model": "é" * 17}, "model: a text of 34 bytes"),
        ({"aliases": ("a" * 33,)}, "aliases: a text of 33"),
        ({"labels": {"k": "v" * 33}}, "labels: a text of 33"),
        ({"labels": {"k" * 33: "v"}}, "labels: a text of 33"),
    ],
)
async def test_sizes_of_registrations(fields: dict[str, Any], said: str) -> None:
    refused: list[str] = []
    registrar = Registrar(_Store(), sizes=Sizes(2, 4, 32), refused=refused.append)
    if not said:
        await registrar.register(_registration(**fields))
        assert refused == []
        return
    with pytest.raises(InvalidRegistration, match=said):
        await registrar.register(_registration(**fields))
    assert refused == ["registration_size"]


async def test_number_of_workers() -> None:
    refused: list[str] = []
    registrar = Registrar(_Store(), sizes=Sizes(workers=2), refused=refused.append)
    await registrar.register(_registration(), others=1)
    with pytest.raises(TooManyWorkers, match=r"2 worker ranks.*limits.max_workers"):
        await registrar.register(_registration(labels={"a": "b"}), others=2)
    assert refused == ["workers"]
