"""The two calls that pods are found by, to a Kubernetes API server: list, and watch."""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from kvindexd.config.discovering import KubernetesSource
from kvindexd.discovery.pods import Meta, Pod

if TYPE_CHECKING:
    import aiohttp

_PAGE = 500
_WATCH_SECONDS = (240, 300)
_LARGEST_LINE = 8 * 1024 * 1024
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubeError(Exception):
    """The API server could not be asked, or refused; the text says what to do."""


class Gone(KubeError):
    """410: the server does not remember this resource version; list again."""


class Unauthorized(KubeError):
    """401: the token is not, or no longer, accepted."""


class Silent(KubeError):
    """A watch has brought nothing for the idle time."""


class Event(NamedTuple):
    """One line of a watch. `pod`: None for a bookmark."""

    type: str
    pod: Pod | None
    version: str


class _Listing(msgspec.Struct):
    metadata: _ListMeta
    items: list[Pod] = []


class _ListMeta(msgspec.Struct):
    version: str = msgspec.field(default="", name="resourceVersion")
    continue_: str = msgspec.field(default="", name="continue")


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class _Bookmark(msgspec.Struct):
    metadata: Meta = msgspec.field(default_factory=Meta)


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class KubeApi:
    """A session with one API server, for use in `async with`. The token is read for each call and
    the certificates for each session: both are rotated while we run."""

    def __init__(self, settings: KubernetesSource) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._url = ""

    async def __aenter__(self) -> Self:
        import aiohttp

        s = self._settings
        base = (s.server or _in_cluster()).rstrip("/")
        namespace = s.namespace or await asyncio.to_thread(own_namespace)
        secure: ssl.SSLContext | bool = True
        if base.startswith("https://") and s.ca_file:
            secure = await asyncio.to_thread(_trusting, s.ca_file)
        self._url = f"{base}/api/v1/pods"
        if namespace != "*":
            self._url = f"{base}/api/v1/namespaces/{namespace}/pods"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=secure, limit=4),
            timeout=aiohttp.ClientTimeout(total=None, connect=s.timeout, sock_read=s.idle_timeout),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def list_pods(self) -> tuple[list[Pod], str]:
        """All pods, and the version to watch from. Raises KubeError."""
        pods: list[Pod] = []
        more = ""
        while True:
            query = self._query(limit=str(_PAGE)) | ({"continue": more} if more else {})
            try:
                async with asyncio.timeout(self._settings.timeout):
                    page = await self._page(query)
            except TimeoutError:
                raise KubeError(
                    f"{self._url}: no list within timeout = {self._settings.timeout:g} s"
                ) from None
            pods += page.items
            more = page.metadata.continue_
            if not more:
                return pods, page.metadata.version

    async def _page(self, query: dict[str, str]) -> _Listing:
        response = await self._get(query)
        try:
            return msgspec.json.decode(await _body(response), type=_Listing)
        except msgspec.DecodeError as e:
            raise KubeError(f"{self._url}: its answer is no list of pods: {e}") from None
        finally:
            response.release()

    async def watch(self, version: str) -> AsyncIterator[Event]:
        """Changes after `version`, until the server ends the watch, as it does every few minutes.
        Raises KubeError: Gone, Silent, ..."""
        seconds = random.randint(*_WATCH_SECONDS)  # noqa: S311 - spreads the load
        query = self._query(
            watch="1",
            allowWatchBookmarks="true",
            resourceVersion=version,
            timeoutSeconds=str(seconds),
        )
        response = await self._get(query)
        try:
            async for line in self._lines(response):
                yield _event(line)
        finally:
            response.close()

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        import aiohttp

        rest = b""
        try:
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield line
                if len(rest) > _LARGEST_LINE:
                    raise KubeError(f"{self._url}: an event of more than {_LARGEST_LINE} bytes")
        except TimeoutError:
            raise Silent(f"{self._url}: nothing in idle_timeout seconds") from None
        except (aiohttp.ClientError, OSError) as e:
            raise KubeError(f"{self._url}: the watch broke off: {e or type(e).__name__}") from None

    def _query(self, **more: str) -> dict[str, str]:
        query = {"labelSelector": self._settings.selector, **more}
        if self._settings.field_selector:
            query["fieldSelector"] = self._settings.field_selector
        return query

    async def _get(self, query: dict[str, str]) -> aiohttp.ClientResponse:
        """A 200 answer whose body is still to be read. Raises KubeError."""
        import aiohttp

        assert self._session is not None  # noqa: S101 - entered
        headers = {"accept": "application/json"}
        if self._settings.token_file:
            token = await asyncio.to_thread(_read, self._settings.token_file)
            headers["authorization"] = f"Bearer {token}"
        try:
            async with asyncio.timeout(self._settings.timeout):
                response = await self._session.get(self._url, params=query, headers=headers)
        except TimeoutError:
            limit = self._settings.timeout
            raise KubeError(f"{self._url}: no answer within timeout = {limit:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise KubeError(f"{self._url}: {e or type(e).__name__}") from None
        if response.status != 200:
            status = response.status
            response.close()
            raise _refusal(self._url, status)
        return response


def _refusal(url: str, status: int) -> KubeError:
    if status == 410:
        return Gone(f"{url}: status 410")
    if status == 401:
        return Unauthorized(f"{url}: status 401: the token is not accepted; check token_file")
    if status == 403:
        return KubeError(
            f"{url}: status 403: the service account must be allowed to list and watch pods"
        )
    return KubeError(f"{url}: status {status}")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    import aiohttp

    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as e:
        raise KubeError(f"{response.url}: the list broke off: {e or type(e).__name__}") from None


def _event(line: bytes) -> Event:
    try:
        event = msgspec.json.decode(line, type=_Line)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            kind = Gone if status.code == 410 else KubeError
            raise kind(f"the watch ended with status {status.code}: {status.message[:200]}")
        if event.type == "BOOKMARK":
            mark = msgspec.json.decode(event.object, type=_Bookmark)
            return Event(event.type, None, mark.metadata.resource_version)
        pod = msgspec.json.decode(event.object, type=Pod)
    except msgspec.DecodeError as e:
        raise KubeError(f"a line of the watch cannot be read: {e}") from None
    return Event(event.type, pod, pod.metadata.resource_version)


def _in_cluster() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{x}", "") for x in ("HOST", "PORT"))
    if not host or not port:
        raise KubeError(
            "discovery.kubernetes.server is not set, and we do not run in a pod "
            "(KUBERNETES_SERVICE_HOST is missing); set it to the API server's URL"
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def own_namespace() -> str:
    """The namespace of the pod that we run in. Raises KubeError."""
    try:
        return Path(_NAMESPACE_FILE).read_text(encoding="utf-8").strip()
    except OSError:
        raise KubeError(
            "discovery.kubernetes.namespace is not set, and we do not run in a pod "
            f"({_NAMESPACE_FILE} is missing); name the pods' namespace"
        ) from None


def _trusting(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as e:
        raise KubeError(f"discovery.kubernetes.ca_file: cannot use {path}: {e}") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise KubeError(f"discovery.kubernetes.token_file: cannot read {path}: {e}") from None
