"""Pods by list and watch, against a stand-in of the API server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from kubestub import KubeStub, pod
from reports import Reported, reporting, until

from kvindexd.config.discovering import KubernetesSource
from kvindexd.discovery.kubernetes import KubernetesPods
from kvindexd.discovery.source import Backoff

TEMPLATE = {
    "model": "m",
    "address": "{pod_ip}:8000",
    "kv_events_endpoint": "tcp://{pod_ip}:5557",
}


@contextlib.asynccontextmanager
async def looking(stub: KubeStub, **settings: Any) -> AsyncIterator[Reported]:
    base = {"server": stub.url, "namespace": "ns", "token_file": "", "ca_file": ""}
    chosen = KubernetesSource(selector="app=vllm", **(base | {"worker": TEMPLATE} | settings))
    source = KubernetesPods("kubernetes:ns/app=vllm", chosen, Backoff(0.02, 0.1))
    async with reporting(source) as report:
        yield report


@pytest.fixture
async def stub() -> AsyncIterator[KubeStub]:
    async with KubeStub().serving() as s:
        yield s


async def test_list_then_watch(stub: KubeStub) -> None:
    stub.page = 2
    for n in range(5):
        stub.apply(pod(f"p{n}", f"10.0.0.{n}"))
    async with looking(stub, field_selector="spec.nodeName=node-1") as seen:
        await until(lambda: seen.view == {f"p{n}": "live" for n in range(5)})
        await until(lambda: stub.watching)
        first = stub.queries[0]
        assert first["path"] == "/api/v1/namespaces/ns/pods"
        assert first["labelSelector"] == "app=vllm"
        assert first["fieldSelector"] == "spec.nodeName=node-1"
        watch = stub.queries[-1]
        assert (watch["watch"], watch["allowWatchBookmarks"]) == ("1", "true")
        assert 240 <= int(watch["timeoutSeconds"]) <= 300
        assert seen.wanted[0].registration.instance == "uid-p0"

        stub.apply(pod("new", "10.0.1.1", ready=False))
        await until(lambda: seen.view and seen.view.get("new") == "starting")
        stub.apply(pod("new", "10.0.1.1"))
        await until(lambda: seen.view and seen.view["new"] == "live")
        stub.apply(pod("new", "10.0.1.1", deleting=True))
        await until(lambda: seen.view and seen.view["new"] == "draining")
        stub.delete("new")
        stub.delete("p0")
        await until(lambda: seen.view == {f"p{n}": "live" for n in range(1, 5)})
        assert stub.lists == 1
        assert seen.failures == []


async def test_unready_for_longer_than_the_grace_time_is_drained(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub, unready_grace=0.15) as seen:
        await until(lambda: seen.view == {"a": "live"})
        stub.apply(pod("a", "10.0.0.1", ready=False))
        begun = time.monotonic()
        await until(lambda: seen.view == {"a": "draining"})
        assert time.monotonic() - begun >= 0.14
        stub.apply(pod("a", "10.0.0.1"))
        await until(lambda: seen.view == {"a": "live"})


async def test_a_watch_goes_on_where_it_broke_off(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub) as seen:
        await until(lambda: stub.watching)
        stub.apply(pod("b", "10.0.0.2"))
        await until(lambda: seen.view == {"a": "live", "b": "live"})
        stub.break_watches()
        await until(lambda: not stub.watching)
        stub.delete("a")  # while nobody watches
        await until(lambda: seen.view == {"b": "live"})
        assert stub.lists == 1
        assert "the watch broke off" in seen.failures[0]


async def test_a_bookmark_moves_the_version_on(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub) as seen:
        await until(lambda: stub.watching and seen.view)
        worked = seen.worked
        marked = stub.bookmark()
        await until(lambda: seen.worked > worked)
        stub.break_watches()
        await until(lambda: len(stub.queries) >= 3)
        assert stub.queries[-1]["resourceVersion"] == str(marked)


async def test_an_expired_version_leads_to_a_new_list(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    stub.apply(pod("b", "10.0.0.2"))
    async with looking(stub) as seen:
        await until(lambda: stub.watching)
        # Said in the watch: what happened since is not in any event.
        stub.expire_watches()
        await until(lambda: not stub.watching)
        stub._pods.pop("a")
        stub.forget_history()
        await until(lambda: seen.view == {"b": "live"})
        # Said to the next watch.
        await until(lambda: stub.watching)
        stub._pods.pop("b")
        stub.forget_history()
        stub.break_watches()
        await until(lambda: seen.view == {})
        assert stub.lists == 3


async def test_a_token_is_read_again(stub: KubeStub, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    stub.token = "first"
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub, token_file=str(token)) as seen:
        await until(lambda: stub.watching and seen.view)
        assert stub.queries[0]["authorization"] == "Bearer first"
        stub.token = "second"
        stub.break_watches()
        await until(lambda: any("status 401" in f for f in seen.failures))
        assert seen.view == {"a": "live"}  # nothing is lost meanwhile
        token.write_text("second\n")
        await until(lambda: stub.watching)
        stub.apply(pod("b", "10.0.0.2"))
        await until(lambda: seen.view == {"a": "live", "b": "live"})
        assert not any("second" in f or "first" in f for f in seen.failures)


async def test_a_server_that_refuses_is_asked_again(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    stub.refuse = 403
    async with looking(stub) as seen:
        await until(lambda: len(seen.failures) >= 2)
        assert "must be allowed to list and watch pods" in seen.failures[0]
        assert seen.view is None  # not: empty
        stub.refuse = 0
        await until(lambda: seen.view == {"a": "live"})
        # A server that is ill for a while: what was found stays.
        stub.refuse = 500
        stub.break_watches()
        await until(lambda: any("status 500" in f for f in seen.failures))
        assert seen.view == {"a": "live"}
        stub.refuse = 0
        stub.apply(pod("b", "10.0.0.2"))
        await until(lambda: seen.view == {"a": "live", "b": "live"})


async def test_a_silent_watch_is_begun_anew(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub, idle_timeout=0.1) as seen:
        await until(lambda: sum("watch" in q for q in stub.queries) >= 3)
        assert stub.lists == 1
        assert seen.failures == []


async def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    held: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    stub = KubeStub()
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with looking(stub, timeout=0.1) as seen:
        await until(lambda: len(seen.failures) >= 2)
    assert "no answer within timeout" in seen.failures[0] or "no list within" in seen.failures[0]
    server.close()


async def test_outside_a_pod_the_settings_say_what_is_missing(
    stub: KubeStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with looking(stub, server="") as seen:
        await until(lambda: seen.failures)
    assert "discovery.kubernetes.server is not set" in seen.failures[0]
    async with looking(stub, token_file=str(tmp_path / "none")) as seen:
        await until(lambda: seen.failures)
    assert "token_file: cannot read" in seen.failures[0]
    async with looking(stub, namespace="") as seen:
        await until(lambda: seen.failures)
    assert "discovery.kubernetes.namespace is not set" in seen.failures[0]


async def test_the_servers_certificate_is_checked_by_the_ca_file(tmp_path: Path) -> None:
    ours, other = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.crt"
    other.cert_pem.write_to_path(str(ca_file))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.issue_cert("127.0.0.1").configure_cert(tls)
    async with KubeStub().serving(tls) as stub:
        stub.apply(pod("a", "10.0.0.1"))
        async with looking(stub, ca_file=str(ca_file)) as seen:
            await until(lambda: seen.failures)
            assert "certificate" in seen.failures[0].lower()
            assert stub.queries == []
            # The file is replaced, as when the cluster's authority is rotated.
            ours.cert_pem.write_to_path(str(ca_file))
            await until(lambda: seen.view == {"a": "live"})
            await until(lambda: stub.watching)
            ca_file.unlink()
            stub.expire_watches()
            await until(lambda: any("cannot use" in f for f in seen.failures))
            assert seen.view == {"a": "live"}


async def test_all_namespaces(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1"))
    async with looking(stub, namespace="*") as seen:
        await until(lambda: seen.view == {"ns/a": "live"})
    assert stub.queries[0]["path"] == "/api/v1/pods"


async def test_a_pod_that_cannot_be_a_worker_is_named(stub: KubeStub) -> None:
    stub.apply(pod("a", "10.0.0.1", annotations={"kvindexd/dp_size": "two"}))
    stub.apply(pod("b", "10.0.0.2", annotations={"kvindexd/dp_size": "2"}))
    async with looking(stub) as seen:
        await until(lambda: seen.view is not None)
        assert "dp_size is 'two'" in seen.unusable["ns/a"]
        ranks = [w.registration for w in seen.wanted]
        assert [(r.worker_id, r.dp_rank) for r in ranks] == [("b", 0), ("b", 1)]
        assert [r.kv_events_endpoint for r in ranks] == [
            "tcp://10.0.0.2:5557",
            "tcp://10.0.0.2:5558",
        ]
