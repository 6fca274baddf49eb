"""One stream of the endpoint-picker protocol: one HTTP request and its response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvindexd import tracing
from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.rpc.ext_proc import messages
from kvindexd.rpc.ext_proc.choosing import Asked, Chooser, Decision, Refused
from kvindexd.rpc.ext_proc.usage import UsageReader
from kvindexd.tokens.bodies import named

_CONTINUE = ep.CommonResponse()
_NO_BODY_MODES = {
    ep.BodySendMode.NONE: "the gateway sends no body",
    ep.BodySendMode.STREAMED: "the gateway sends the body after the headers are gone",
}


class Observer(Protocol):
    """Where exchanges report what they did (metrics, log)."""

    def decided(self, decision: Decision) -> None:
        """A worker was picked."""
        ...

    def refused(self, refused: Refused) -> None:
        """A request got an error instead."""
        ...

    def served(self, how: str) -> None:
        """The gateway told who served: picked, fallback or other."""
        ...


class Exchange:
    """Answers the messages of one stream in order. `end` must be called when the stream is over.

    In BUFFERED mode Envoy waits for an answer to the headers before it sends the body, and takes
    the pick with the answer to the body. In FULL_DUPLEX_STREAMED mode it sends all without
    waiting, takes the pick with the answer to the headers, which is held back until the body is
    there, and wants the body back.
    """

    def __init__(self, chooser: Chooser, observer: Observer, max_body_bytes: int) -> None:
        self._chooser = chooser
        self._observer = observer
        self._max_body = max_body_bytes
        self._headers: Mapping[str, str] = {}
        self._subset: list[str] | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._decision: Decision | None = None
        self._usage = UsageReader("")
        self._elsewhere = False
        self._failed = False
        self.duplex = False
        """Bodies of requests are taken in full before the headers are answered."""
        self._duplex_response = False
        self._partial = False
        self.over = False
        """The request has been refused: nothing more is to be said."""
        self._traced: dict[str, tracing.Value] = {}

    @property
    def picked(self) -> bool:
        """Whether a worker has been picked."""
        return self._decision is not None

    async def answer(self, request: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        """The answers to one message, in order; none while there is more to come first."""
        if request.observability_mode:
            return []
        if request.HasField("protocol_config"):
            self._configure(request.protocol_config)
        if request.metadata_context.filter_metadata and self._decision is None:
            hint = messages.subset_hint(request)
            self._subset = hint if hint is not None else self._subset
        kind = request.WhichOneof("request")
        try:
            match kind:
                case "request_headers":
                    return await self._request_headers(request)
                case "request_body":
                    return await self._request_body(request.request_body)
                case "request_trailers":
                    return await self._request_trailers()
                case "response_headers":
                    return self._response_headers(request)
                case "response_body":
                    return self._response_body(request.response_body)
                case "response_trailers":
                    return [ep.ProcessingResponse(response_trailers=ep.TrailersResponse())]
        except Refused as e:
            self._observer.refused(e)
            self.over = True
            self._traced |= {"http.response.status_code": e.status, "kvindexd.refused": e.code}
            return [messages.refusal(e.status, e.code, str(e))]
        return []

    def traced(self) -> dict[str, tracing.Value]:
        """What a span says of the request: how it was answered, and what the engine reported."""
        usage = self._usage.usage
        known = {
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
        }
        return self._traced | {name: count for name, count in known.items() if count is not None}

    def end(self) -> None:
        """The stream is over, for whatever reason: release what was picked."""
        decision, self._decision = self._decision, None
        if decision is not None:
            elsewhere = self._elsewhere or self._failed
            self._chooser.end(decision, self._usage.usage, elsewhere=elsewhere)

    # -- the request --------------------------------------------------------------------------

    def _configure(self, config: ep.ProtocolConfiguration) -> None:
        self.duplex = config.request_body_mode == ep.BodySendMode.FULL_DUPLEX_STREAMED
        self._duplex_response = config.response_body_mode == ep.BodySendMode.FULL_DUPLEX_STREAMED
        self._partial = config.request_body_mode == ep.BodySendMode.BUFFERED_PARTIAL

    async def _request_headers(self, request: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        self._headers = messages.headers_of(request.request_headers)
        why = ""
        if request.HasField("protocol_config"):
            why = _NO_BODY_MODES.get(request.protocol_config.request_body_mode, "")
        if request.request_headers.end_of_stream:
            return await self._headers_with_pick("")
        if why:
            return await self._headers_with_pick(why)
        if self.duplex:
            return []
        return [ep.ProcessingResponse(request_headers=ep.HeadersResponse(response=_CONTINUE))]

    async def _headers_with_pick(self, why: str) -> list[ep.ProcessingResponse]:
        common, told = await self._pick(why)
        return [
            ep.ProcessingResponse(
                request_headers=ep.HeadersResponse(response=common), dynamic_metadata=told
            )
        ]

    async def _request_body(self, body: ep.HttpBody) -> list[ep.ProcessingResponse]:
        if self._decision is not None and not self.duplex:
            return [ep.ProcessingResponse(request_body=ep.BodyResponse(response=_CONTINUE))]
        self._body.append(body.body)
        self._size += len(body.body)
        if self._size > self._max_body:
            raise Refused(
                413,
                "body_too_large",
                f"the body has more than ext_proc.max_body_bytes = {self._max_body} bytes",
            )
        if self.duplex:
            return await self._whole(last=True) if body.end_of_stream else []
        # Without end_of_stream, trailers follow, or this is the beginning of a body that is
        # handed on in pieces: either way the pick can be told here and not later.
        self._partial = self._partial or not body.end_of_stream
        common, told = await self._pick("")
        return [
            ep.ProcessingResponse(
                request_body=ep.BodyResponse(response=common), dynamic_metadata=told
            )
        ]

    async def _request_trailers(self) -> list[ep.ProcessingResponse]:
        trailers = ep.ProcessingResponse(request_trailers=ep.TrailersResponse())
        if self._decision is not None:
            return [trailers]
        if self.duplex:
            return [*await self._whole(last=False), trailers]
        _, told = await self._pick("")
        trailers.dynamic_metadata.CopyFrom(told)
        return [trailers]

    async def _whole(self, last: bool) -> list[ep.ProcessingResponse]:
        """FULL_DUPLEX_STREAMED: the headers' answer, then the body back."""
        answers = await self._headers_with_pick("")
        body = b"".join(self._body)
        self._body.clear()
        if body or last:
            for part in messages.chunks(body, last):
                answers.append(ep.ProcessingResponse(request_body=ep.BodyResponse(response=part)))
        return answers

    async def _pick(self, why: str) -> tuple[ep.CommonResponse, Any]:
        encoding = self._headers.get("content-encoding", "identity")
        if self._body and not why and encoding != "identity":
            why = f"the body is in content-encoding {named(encoding)}"
        asked = Asked(
            self._headers.get(":method", ""),
            self._headers.get(":path", ""),
            b"".join(self._body),
            self._subset,
            whole=not (self._partial or why),
            why=why,
        )
        decision = await self._chooser.choose(asked)
        self._decision = decision
        self._observer.decided(decision)
        endpoints = ",".join(decision.endpoints)
        common = ep.CommonResponse(
            header_mutation=messages.mutation({messages.DESTINATION: endpoints} | decision.headers),
            # A route that is matched by the header was chosen before there was one.
            clear_route_cache=True,
        )
        return common, messages.metadata(endpoints, decision.told())

    # -- the response -------------------------------------------------------------------------

    def _response_headers(self, request: ep.ProcessingRequest) -> list[ep.ProcessingResponse]:
        headers = messages.headers_of(request.response_headers)
        self._usage = UsageReader(
            headers.get("content-type", ""), headers.get("content-encoding", "")
        )
        status = headers.get(":status", "200")
        self._failed = not status.startswith("2")
        if status.isdecimal():
            self._traced["http.response.status_code"] = int(status)
        endpoint = messages.served_endpoint(request)
        if endpoint and self._decision is not None:
            self._decision, how = self._chooser.served(self._decision, endpoint)
            self._elsewhere = how == "other"
            self._observer.served(how)
            self._traced["kvindexd.served_by"] = how
        return [ep.ProcessingResponse(response_headers=ep.HeadersResponse(response=_CONTINUE))]

    def _response_body(self, body: ep.HttpBody) -> list[ep.ProcessingResponse]:
        self._usage.feed(body.body, body.end_of_stream)
        parts = (
            messages.chunks(body.body, body.end_of_stream)
            if self._duplex_response
            else iter([_CONTINUE])
        )
        return [ep.ProcessingResponse(response_body=ep.BodyResponse(response=p)) for p in parts]
