"""Workers from DNS and from files: each source by itself, with real sockets and files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import dns.rcode
import pytest
from dnsstub import DnsStub
from reports import Reported, reporting, until

from kvindexd.config import ConfigError
from kvindexd.config.discovering import DnsSource
from kvindexd.discovery.addresses import Address
from kvindexd.discovery.dns import DnsAddresses, LookupFailed, Resolver, SystemResolver
from kvindexd.discovery.files import FileSource, parse

TEMPLATE = {"model": "m", "kv_events_endpoint": "tcp://{ip}:5557"}
WORKER = {
    "worker_id": "w0",
    "model": "m",
    "address": "h:1",
    "kv_events_endpoint": "tcp://h:5557",
}


@contextlib.asynccontextmanager
async def looking(resolver: Resolver | None = None, **settings: Any) -> AsyncIterator[Reported]:
    base = {"host": "engines.test", "interval": 0.02, "timeout": 0.5, "grace": 0.1}
    chosen = DnsSource(**(base | {"worker": TEMPLATE} | settings))
    async with reporting(DnsAddresses("dns:engines.test", chosen, resolver)) as report:
        yield report


# -- DNS --------------------------------------------------------------------------------------


class Scripted:
    """A resolver that answers what it is told."""

    def __init__(self, *ips: str) -> None:
        self.ips: list[str] | None = list(ips)
        self.calls = 0

    async def look_up(self, host: str) -> Iterable[Address]:
        self.calls += 1
        if self.ips is None:
            raise LookupFailed(f"{host}: broken")
        return [Address(ip) for ip in self.ips]


async def test_a_failed_look_up_keeps_the_last_answer() -> None:
    resolver = Scripted("10.0.0.1", "fd00::2")
    async with looking(resolver) as seen:
        await until(lambda: seen.view == {"10.0.0.1": "live", "[fd00::2]": "live"})
        ends = {w.registration.kv_events_endpoint for w in seen.wanted}
        assert ends == {"tcp://10.0.0.1:5557", "tcp://[fd00::2]:5557"}
        resolver.ips = None
        await until(lambda: len(seen.failures) >= 10)  # longer than the grace time
        assert seen.view == {"10.0.0.1": "live", "[fd00::2]": "live"}
        resolver.ips = ["10.0.0.1"]
        await until(lambda: seen.view == {"10.0.0.1": "live", "[fd00::2]": "draining"})
        await until(lambda: seen.view == {"10.0.0.1": "live"})


async def test_nothing_is_said_before_the_first_answer() -> None:
    resolver = Scripted()
    resolver.ips = None
    async with looking(resolver) as seen:
        await until(lambda: len(seen.failures) >= 3)
        assert seen.view is None


async def test_the_systems_resolver() -> None:
    assert Address("127.0.0.1") in await SystemResolver().look_up("localhost")
    with pytest.raises(LookupFailed, match=r"no-such-host\.invalid: "):
        await SystemResolver().look_up("no-such-host.invalid")


@pytest.fixture
async def server() -> AsyncIterator[DnsStub]:
    async with DnsStub().serving() as stub:
        yield stub


async def test_a_server_of_ones_own(server: DnsStub) -> None:
    server.records["engines.test", "A"] = ["10.0.0.1", "10.0.0.2"]
    server.records["engines.test", "AAAA"] = ["fd00::3"]
    async with looking(server=server.address) as seen:
        live = {"10.0.0.1": "live", "10.0.0.2": "live", "[fd00::3]": "live"}
        await until(lambda: seen.view == live)
        for broken in (dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN):
            server.rcode = broken
            failures = len(seen.failures)
            await until(lambda n=failures: len(seen.failures) >= n + 3)
            assert seen.view == live
        # No address at all is not an answer to act on either.
        server.rcode = dns.rcode.NOERROR
        kept, server.records = server.records, {}
        failures = len(seen.failures)
        await until(lambda: len(seen.failures) >= failures + 3)
        assert seen.view == live
        server.records = kept
        server.records["engines.test", "A"] = ["10.0.0.2"]
        await until(lambda: seen.view == {"10.0.0.2": "live", "[fd00::3]": "live"})


async def test_service_records_tell_the_port(server: DnsStub) -> None:
    server.records["_http._tcp.test", "SRV"] = [
        "0 0 8000 a.test.",
        "0 0 8001 b.test.",
    ]
    server.records["a.test", "A"] = ["10.0.0.1"]
    server.records["b.test", "A"] = ["10.0.0.1"]
    async with looking(host="_http._tcp.test", type="SRV", server=server.address) as seen:
        await until(lambda: seen.view == {"a.test:8000": "live", "b.test:8001": "live"})
        addresses = {w.registration.address for w in seen.wanted}
        assert addresses == {"10.0.0.1:8000", "10.0.0.1:8001"}


async def test_a_server_that_does_not_answer_is_not_waited_for(server: DnsStub) -> None:
    server.silent = True
    async with looking(server=server.address, timeout=0.05) as seen:
        await until(lambda: len(seen.failures) >= 2)
        assert server.questions >= 2
        assert seen.view is None


# -- files ------------------------------------------------------------------------------------

FORMS = {
    "toml": "[[workers]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in WORKER.items()),
    "json": json.dumps([WORKER]),
    "yaml": "workers:\n  - " + "\n    ".join(f"{k}: {v}" for k, v in WORKER.items()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_format_says_the_same(form: str) -> None:
    (one,) = parse(FORMS[form].encode(), Path(f"w.{form}"))
    assert one.registration.kv_events_endpoint == "tcp://h:5557"
    (one,) = parse(FORMS[form].encode(), Path(f"w.{form}"), bind_events=True)
    assert one.registration.bind_events


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.toml", "[[workers]\n", r"w\.toml is not valid TOML: "),
        ("w.json", "[", r"w\.json is not valid JSON: "),
        ("w.yaml", "a: [", r"w\.yaml is not valid YAML: "),
        ("w.json", '{"worker": []}', "'worker' is unknown; expected workers"),
        ("w.json", '{"workers": 3}', r"workers is 3 \(file w\.json\); expected a list of tables"),
        ("w.json", '[{"worker_id": "w"}]', r"workers\[0\]\.model is missing \(file w\.json\)"),
        ("w.json", json.dumps([WORKER, WORKER]), r"workers\[1\] has the worker_id 'w0'"),
        ("w.json", json.dumps([WORKER | {"colour": 1}]), r"unknown setting workers\[0\]\.colour"),
    ],
)
def test_a_broken_file_is_explained(name: str, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(content.encode(), Path(name))


async def test_a_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([WORKER]))
    before = path.stat()
    async with reporting(FileSource("file:w", str(path), 0.01)) as seen:
        await until(lambda: seen.view == {"w0": "live"})
        path.write_text(json.dumps([WORKER | {"worker_id": "w1"}]))  # the same length
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await until(lambda: seen.view == {"w1": "live"})


async def test_a_file_behind_a_link_that_is_swapped(tmp_path: Path) -> None:
    """As a ConfigMap is mounted: the new content is another folder, and a link moves to it."""
    for version, worker in (("v1", "w1"), ("v2", "w2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "w.json").write_text(json.dumps([WORKER | {"worker_id": worker}]))
    link = tmp_path / "..data"
    link.symlink_to("v1")
    source = FileSource("file:w", str(link / "w.json"), 60)
    async with reporting(source) as seen:
        await until(lambda: seen.view == {"w1": "live"})
        swapped = tmp_path / "..tmp"
        swapped.symlink_to("v2")
        swapped.rename(link)
        source.look()
        await until(lambda: seen.view == {"w2": "live"})
