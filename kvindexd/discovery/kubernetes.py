"""Workers from pods: list them, then watch; the pure part is in pods.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvindexd.config.discovering import KubernetesSource
from kvindexd.discovery.kubeapi import Gone, KubeApi, KubeError, Silent, Unauthorized
from kvindexd.discovery.pods import Pods
from kvindexd.discovery.source import Backoff, Report

_SHORT = 1.0
"""Seconds of a watch that ends so soon that the server may be unwell."""
_GATHER = 0.02
"""Seconds in which changes are gathered, as in a rollout."""
_FAILURES = 3
"""Failures of a watch in a row after which all pods are listed again."""


class KubernetesPods:
    """The pods of one label selector."""

    def __init__(
        self, name: str, settings: KubernetesSource, backoff: Backoff | None = None
    ) -> None:
        self.name = name
        self._settings = settings
        self._pods = Pods(_template(settings), settings.prefix, settings.unready_grace)
        self._backoff = backoff or Backoff()
        self._changed = asyncio.Event()

    def look(self) -> None:
        """The watch tells of every change; asking more often would find nothing."""

    async def run(self, report: Report) -> None:
        """List and watch for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(report), name="pods")
            while True:
                try:
                    await self._list_and_watch(report)
                except KubeError as e:
                    report.failed(str(e))
                await asyncio.sleep(self._backoff.next())

    async def _publish(self, report: Report) -> None:
        """Tell what the pods come to, at each change and when a grace time is over."""
        await self._changed.wait()
        while True:
            await asyncio.sleep(_GATHER)
            self._changed.clear()
            now = time.monotonic()
            found = self._pods.found(now)
            report.publish(found.wanted, found.unusable)
            pause = None if found.again_at is None else max(0.0, found.again_at - now)
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _list_and_watch(self, report: Report) -> None:
        """Returns when all pods are to be listed again. Raises KubeError."""
        async with KubeApi(self._settings) as api:
            pods, version = await self._list(api)
            self._pods.replace(pods, time.monotonic())
            self._changed.set()
            while True:
                begun = time.monotonic()
                try:
                    version = await self._watch(api, version, report)
                except Gone:
                    return
                except Silent:
                    self._backoff.reset()
                except _Broken as e:
                    version = e.version
                    if time.monotonic() - begun > _SHORT:
                        self._backoff.reset()
                    if self._backoff.failures >= _FAILURES:
                        raise KubeError(str(e)) from None
                    report.failed(str(e))
                    await asyncio.sleep(self._backoff.next())
                else:
                    await self._ended(time.monotonic() - begun)

    async def _ended(self, lasted: float) -> None:
        """The server ended the watch, as it does now and then; not in a circle without a pause."""
        if lasted > _SHORT:
            self._backoff.reset()
        else:
            await asyncio.sleep(self._backoff.next())

    async def _list(self, api: KubeApi) -> tuple[list[Any], str]:
        try:
            return await api.list_pods()
        except Unauthorized:
            return await api.list_pods()  # the token may have been replaced just now

    async def _watch(self, api: KubeApi, version: str, report: Report) -> str:
        """Follow one watch to its end; the version to go on from. Raises Gone, _Broken."""
        try:
            async for event in api.watch(version):
                version = event.version or version
                if event.pod is not None:
                    if event.type == "DELETED":
                        self._pods.remove(event.pod)
                    else:
                        self._pods.put(event.pod, time.monotonic())
                    self._changed.set()
                self._backoff.reset()
                if not self._changed.is_set():
                    report.works()  # with what was published last
        except (Gone, Silent):
            raise
        except KubeError as e:
            raise _Broken(str(e), version) from None
        return version


class _Broken(KubeError):
    """A watch failed; `version`: how far it had come."""

    def __init__(self, why: str, version: str) -> None:
        super().__init__(why)
        self.version = version


def _template(settings: KubernetesSource) -> dict[str, Any]:
    everywhere = settings.namespace == "*"
    name = "{pod_namespace}/{pod_name}" if everywhere else "{pod_name}"
    return {"worker_id": name, "kv_events_endpoint": "tcp://{pod_ip}:5557"} | settings.worker
