"""The paths under /ui: static files, JSON, and the headers that keep both harmless."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from urllib.parse import parse_qs

from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.telemetry import Metrics
from kvindexd.telemetry.http import Request, Response, text
from kvindexd.ui.explaining import JSON, MAX_BODY, Explains, Form, failed
from kvindexd.ui.fleet import Fleet

_DIGITS = 15
EXPLAIN = "/ui/api/explain"
_FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "explain.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Ui:
    """Pages of one process that has a replica; `run` takes the samples that the charts show."""

    def __init__(self, replica: Replica[Registration], metrics: Metrics, role: str) -> None:
        self._fleet = Fleet(replica, metrics, role)
        self._form = Form()
        folder = resources.files(__package__) / "static"
        self._static = {
            f"/ui/{name}": Response(200, kind, (folder / name).read_bytes())
            for name, kind in _FILES.items()
        }
        # Every link is relative, so that the page also works behind a proxy's path prefix.
        self._static["/ui"] = self._static.pop("/ui/index.html")
        self._static["/ui/"] = text(308, "see /ui", Location="../ui")

    def serve(self, index: Explains, account: Callable[[WorkerKey], Mapping[str, int]]) -> None:
        """The service is up: from now on the form works, and picks are shown."""
        self._form.index = index
        self._fleet.account = account

    async def run(self) -> None:
        """Until cancelled."""
        await self._fleet.run()

    def max_body(self, path: str) -> int:
        """See telemetry.http.Pages."""
        return MAX_BODY if path == EXPLAIN else 0

    async def answer(self, request: Request) -> Response | None:
        """See telemetry.http.Pages."""
        if request.path != "/ui" and not request.path.startswith("/ui/"):
            return None
        found = self._static.get(request.path) or await self._data(request)
        return found._replace(headers={**found.headers, **HEADERS})

    async def _data(self, request: Request) -> Response:
        path, query = request.path, parse_qs(request.query)
        if path == "/ui/api/fleet":
            return Response(200, JSON, await self._fleet.fleet())
        if path == "/ui/api/history":
            since = _number(query, "since")
            if since is None:
                return failed(400, "INVALID_ARGUMENT", "since: expected a whole number")
            return Response(200, JSON, self._fleet.history(since))
        if path == "/ui/api/worker":
            return self._worker(query)
        if path == EXPLAIN:
            return await self._explain(request)
        return text(404, "see /ui")

    def _worker(self, query: Mapping[str, list[str]]) -> Response:
        rank = _number(query, "dp_rank")
        if rank is None:
            return failed(400, "INVALID_ARGUMENT", "dp_rank: expected a whole number")
        key = WorkerKey(_first(query, "namespace"), _first(query, "worker_id"), rank)
        body = self._fleet.worker(key)
        if body is None:
            return failed(404, "NOT_FOUND", f"worker {key} is not registered")
        return Response(200, JSON, body)

    async def _explain(self, request: Request) -> Response:
        if request.method != "POST":
            return text(405, "only POST", Allow="POST")
        # A page of somebody else can send neither this type nor, with it, a foreign origin.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            return failed(415, "INVALID_ARGUMENT", f"Content-Type: expected {JSON}")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return failed(403, "PERMISSION_DENIED", "not from another site's page")
        return await self._form.answer(request.body)


def _number(query: Mapping[str, list[str]], name: str) -> int | None:
    """A number from 0 on, 0 where none is given; None for anything else."""
    given = _first(query, name, "0")
    return int(given) if given.isdecimal() and len(given) <= _DIGITS else None


def _first(query: Mapping[str, list[str]], name: str, default: str = "") -> str:
    return query.get(name, [default])[0]
