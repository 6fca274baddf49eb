"""Sections of what answers gateways."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvindexd.config.base import Section


class ServerConfig(Section, frozen=True, kw_only=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="host:port; port 0 = any, named in the ready line")] = (
        "127.0.0.1:50051"
    )
    admin_listen: Annotated[
        str,
        Meta(description='host:port for KVIndexAdmin (and KVIndex); "" = on listen'),
    ] = ""
    max_message_bytes: Annotated[int, Meta(ge=1024, description="Largest gRPC message")] = (
        64 * 1024 * 1024
    )
    grace_seconds: Annotated[
        float, Meta(ge=0, description="Time that running calls get at shutdown")
    ] = 5.0
    processes: Annotated[
        int,
        Meta(
            ge=1,
            description="Processes that answer behind the same ports, one per core that is to be "
            "used (not for sidecar)",
        ),
    ] = 1


class ExtProcConfig(Section, frozen=True, kw_only=True):
    """Envoy's external processor."""

    listen: Annotated[str, Meta(description='host:port; "" = off')] = "127.0.0.1:9002"
    namespace: Annotated[str, Meta(description="Namespace whose workers are picked")] = ""
    budget: Annotated[
        float, Meta(gt=0, description="Time for a pick; then it is made by load alone")
    ] = 0.05
    fallbacks: Annotated[
        int, Meta(ge=0, description="Further endpoints named after the picked one")
    ] = 2
    max_body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body")] = (
        64 * 1024 * 1024
    )


class TokensConfig(Section, frozen=True, kw_only=True):
    """From prompts as text to token ids."""

    models: Annotated[
        dict[str, str],
        Meta(
            description='Model -> folder of its tokenizer, "engine" to ask a worker\'s /tokenize, '
            "or the http:// URL of a server that has it"
        ),
    ] = msgspec.field(default_factory=dict)
    loras: Annotated[
        dict[str, str],
        Meta(description="Adapter -> base model, for requests that name an adapter as their model"),
    ] = msgspec.field(default_factory=dict)
    timeout: Annotated[float, Meta(gt=0, description="Limit of tokenizing one prompt")] = 2.0
    cache_tokens: Annotated[
        int, Meta(ge=0, description="Token ids kept for prompts that come again, in total")
    ] = 4_000_000


class PickConfig(Section, frozen=True, kw_only=True):
    """Choosing a worker: cost = overlap_weight x role weight x missing blocks + load, in blocks."""

    overlap_weight: Annotated[
        float, Meta(ge=0, description="Cost of a block that must be computed, against load")
    ] = 1.0
    host_weight: Annotated[
        float, Meta(ge=0, le=1, description="Worth of a block in host memory, of one on the device")
    ] = 0.7
    storage_weight: Annotated[
        float, Meta(ge=0, le=1, description="Worth of a block on disk or remote storage")
    ] = 0.3
    prefill_weight: Annotated[
        float, Meta(ge=0, description="Factor of overlap_weight for prefill workers")
    ] = 20.0
    decode_weight: Annotated[
        float, Meta(ge=0, description="Factor of overlap_weight for decode workers")
    ] = 2.0
    mixed_weight: Annotated[
        float, Meta(ge=0, description="Factor of overlap_weight for mixed workers")
    ] = 1.0
    prediction_ttl: Annotated[
        float, Meta(ge=0, description="Life of what a pick predicts until events come; 0 = off")
    ] = 2.0
    lease: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Time that a pick counts as load unless completed"),
    ] = 300.0
    recent_half_life: Annotated[
        float, Meta(gt=0, description="Half-life of the load that recent picks leave behind")
    ] = 0.1
    max_requests: Annotated[
        int, Meta(ge=1, description="Picks remembered as in flight, per scorer")
    ] = 100_000
    share_interval: Annotated[
        float, Meta(gt=0, description="Interval at which scorers exchange what is in flight")
    ] = 0.25
    drift_threshold: Annotated[
        float,
        Meta(gt=0, le=1, description="Part of prompt tokens predicted wrongly that marks a worker"),
    ] = 0.2
    drift_window: Annotated[
        int, Meta(ge=1, description="Completed requests per worker that are looked at")
    ] = 50
    drift_minimum: Annotated[
        int, Meta(ge=1, description="Completed requests before a worker is judged")
    ] = 10
    drift_cooldown: Annotated[
        float, Meta(ge=0, description="Time before a worker is resynced for drifting again")
    ] = 60.0
