"""Answers of the endpoint-picker protocol, and what its requests say beside headers and body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from google.protobuf import struct_pb2

from kvindexd.extproc.v1 import ext_proc_pb2 as ep

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
OWN = "kvindexd"
"""Namespace of the dynamic metadata that tells how a pick was made."""
CHUNK = 62_000
"""Bytes of a body that go into one message: Envoy refuses 64 KiB and more."""

_OVERWRITE = ep.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def headers_of(message: ep.HttpHeaders) -> dict[str, str]:
    """Names in lower case; of a name that occurs twice, the first value."""
    found: dict[str, str] = {}
    for h in message.headers.headers:
        value = h.raw_value.decode("utf-8", "replace") if h.raw_value else h.value
        found.setdefault(h.key.lower(), value)
    return found


def subset_hint(request: ep.ProcessingRequest) -> list[str] | None:
    """The endpoints that may be picked, as a list or as one comma-separated string; None where
    there is no hint. A hint that names nobody is an empty list: nobody may be picked."""
    known = request.metadata_context.filter_metadata
    if SUBSET_HINT not in known or SUBSET not in known[SUBSET_HINT].fields:
        return None
    value = known[SUBSET_HINT].fields[SUBSET]
    listed = (
        [v.string_value for v in value.list_value.values]
        if value.WhichOneof("kind") == "list_value"
        else [value.string_value]
    )
    return [e for text in listed for part in text.split(",") if (e := part.strip())]


def served_endpoint(request: ep.ProcessingRequest) -> str:
    """Who served the request: what the gateway reports in metadata, else Envoy's own attribute
    `upstream.address`; "" where neither is sent."""
    known = request.metadata_context.filter_metadata
    if LB in known and SERVED in known[LB].fields:
        return known[LB].fields[SERVED].string_value
    for attributes in request.attributes.values():
        if "upstream.address" in attributes.fields:
            return attributes.fields["upstream.address"].string_value
    return ""


def mutation(headers: Mapping[str, str]) -> ep.HeaderMutation:
    """Set these headers over whatever the client sent under their names."""
    return ep.HeaderMutation(
        set_headers=[
            ep.HeaderValueOption(
                header=ep.HeaderValue(key=key, raw_value=value.encode()),
                append_action=_OVERWRITE,
            )
            for key, value in headers.items()
        ]
    )


def metadata(endpoints: str, told: Mapping[str, Any]) -> struct_pb2.Struct:
    """The pick under Envoy's own namespace, and how it was made under ours."""
    out = struct_pb2.Struct()
    out.update({LB: {DESTINATION: endpoints}, OWN: dict(told)})
    return out


def chunks(body: bytes, last: bool) -> Iterator[ep.CommonResponse]:
    """A body for FULL_DUPLEX_STREAMED mode; `last`: nothing, trailers included, comes after it.
    An empty body is one empty message."""
    for at in range(0, len(body) or 1, CHUNK):
        part = ep.StreamedBodyResponse(
            body=body[at : at + CHUNK], end_of_stream=last and at + CHUNK >= len(body)
        )
        yield ep.CommonResponse(body_mutation=ep.BodyMutation(streamed_response=part))


_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def refusal(status: int, code: str, text: str) -> ep.ProcessingResponse:
    """End the request with an error body as OpenAI's API has it; `code` also goes into Envoy's
    response code details."""
    error = {"message": text, "type": _TYPES.get(status, "server_error"), "code": code}
    headers = {"content-type": "application/json"}
    if status in (429, 503):
        headers["retry-after"] = "1"
    return ep.ProcessingResponse(
        immediate_response=ep.ImmediateResponse(
            status=ep.HttpStatus(code=status),
            headers=mutation(headers),
            body=msgspec.json.encode({"error": error}),
            details=f"kvindexd_{code}",
        )
    )
