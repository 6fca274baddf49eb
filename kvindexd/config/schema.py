"""The settings: one struct per section of the TOML file. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvindexd.config.answering import ExtProcConfig, PickConfig, ServerConfig, TokensConfig
from kvindexd.config.base import ConfigError, Section, parse_listen
from kvindexd.config.discovering import DiscoveryConfig
from kvindexd.config.observing import LogConfig, MetricsConfig, TracingConfig
from kvindexd.config.protecting import AuthConfig, RegistrationConfig, TlsConfig
from kvindexd.config.storing import IndexConfig, RedisConfig
from kvindexd.registration import Registration, RoleName

__all__ = [
    "SECTIONS",
    "AuthConfig",
    "Config",
    "ConfigError",
    "DiscoveryConfig",
    "EngineMetricsConfig",
    "ExtProcConfig",
    "GroupsConfig",
    "IndexConfig",
    "IngestConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "PickConfig",
    "RedisConfig",
    "RegistrationConfig",
    "Section",
    "ServerConfig",
    "TlsConfig",
    "TokensConfig",
    "TracingConfig",
    "WorkerConfig",
    "parse_listen",
]

Treatment = Literal["main", "auxiliary", "ignored"]


class IngestConfig(Section, frozen=True, kw_only=True):
    """Reading the engines' events."""

    on_lost_events: Annotated[
        Literal["reset", "keep"],
        Meta(description="After events were lost for good: forget the worker's blocks, or not"),
    ] = "reset"
    bind_events: Annotated[
        bool, Meta(description="bind_events of the [[workers]] that do not set it")
    ] = False
    replay_timeout: Annotated[
        float, Meta(gt=0, description="Longest wait for the next answer of a replay")
    ] = 2.0
    buffer_batches: Annotated[
        int, Meta(ge=1, description="Batches kept per worker rank while the store is away")
    ] = 10_000
    rcvhwm: Annotated[int, Meta(ge=1, description="Receive high-water mark, in messages")] = 100_000
    lease_ttl: Annotated[
        float, Meta(gt=0, description="Life of a worker rank's lease; longer than heartbeat")
    ] = 10.0
    heartbeat: Annotated[float, Meta(gt=0, description="Interval of lease renewals")] = 2.0
    event_grace: Annotated[
        float, Meta(gt=0, description="Time without a connection before a worker turns STALE")
    ] = 30.0
    peer_timeout: Annotated[
        float, Meta(gt=0, description="Silence of a peer after which its connection is given up")
    ] = 15.0
    max_event_bytes: Annotated[int, Meta(ge=1024, description="Largest batch accepted")] = (
        32 * 1024 * 1024
    )


class EngineMetricsConfig(Section, frozen=True, kw_only=True):
    """Reading the load that engines show on their own metrics pages."""

    interval: Annotated[float, Meta(ge=0, description="Interval of reading them; 0 = off")] = 0.0
    path: Annotated[
        str, Meta(pattern="^/", description="Path of the page, on the worker's address")
    ] = "/metrics"
    timeout: Annotated[float, Meta(gt=0, description="Longest wait for a page")] = 2.0
    waiting_weight: Annotated[
        float, Meta(ge=0, description="Load in blocks per request in the engine's queue")
    ] = 0.0


class GroupsConfig(Section, frozen=True, kw_only=True):
    """KV-cache groups."""

    treat_as: Annotated[
        dict[str, Treatment], Meta(description="Overrides of how a group kind is treated")
    ] = msgspec.field(default_factory=dict)


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Bounds on memory and work."""

    max_prompt_tokens: Annotated[int, Meta(ge=1, description="Longest prompt, in tokens")] = (
        1_048_576
    )
    bindings_per_rank: Annotated[
        int, Meta(ge=1, description="Engine hashes remembered per worker rank")
    ] = 4_000_000
    blocks_per_rank: Annotated[int, Meta(ge=1, description="Blocks held per worker rank")] = (
        4_000_000
    )
    parked_per_rank: Annotated[
        int, Meta(ge=0, description="Stores per worker rank that wait for their parent")
    ] = 10_000
    parked_age: Annotated[float, Meta(gt=0, description="Longest such wait")] = 300.0
    max_concurrent_calls: Annotated[
        int, Meta(ge=1, description="gRPC calls at once; more answer RESOURCE_EXHAUSTED")
    ] = 1024
    feed_maxlen: Annotated[int, Meta(ge=100, description="Batches kept in the feed, per shard")] = (
        100_000
    )
    max_candidates: Annotated[int, Meta(ge=1, description="Candidates that one request names")] = (
        4096
    )
    max_batch: Annotated[int, Meta(ge=1, description="Prompts of one ScoreWorkersBatch")] = 1024
    streams_per_client: Annotated[
        int, Meta(ge=1, description="Streaming calls of one client at once, ext_proc aside")
    ] = 256
    ext_proc_streams: Annotated[
        int, Meta(ge=1, description="HTTP requests in ext_proc at once, until their responses end")
    ] = 16_384
    max_workers: Annotated[int, Meta(ge=1, description="Worker ranks registered in all")] = 10_000
    max_labels: Annotated[
        int, Meta(ge=0, description="Labels of a worker, and aliases, and labels of a request")
    ] = 64
    max_name_bytes: Annotated[
        int, Meta(ge=16, description="Bytes of any one text in a registration")
    ] = 1024


class WorkerConfig(Section, frozen=True, kw_only=True):
    """One data-parallel rank of one worker: the input fields of message Worker."""

    worker_id: Annotated[str, Meta(min_length=1, description="Unique per namespace")]
    model: Annotated[str, Meta(min_length=1, description="Model id")]
    address: Annotated[str, Meta(min_length=1, description="host:port that serves requests")]
    kv_events_endpoint: Annotated[
        str, Meta(min_length=1, description="ZMQ endpoint of this rank's events")
    ]
    replay_endpoint: Annotated[str, Meta(description='ZMQ endpoint; "" = none')] = ""
    topic: Annotated[str, Meta(description='Subscription prefix; "" = all')] = ""
    dp_rank: Annotated[int, Meta(ge=0, description="Data-parallel rank")] = 0
    dp_size: Annotated[int, Meta(ge=0, description="0 or 1 = no data parallelism")] = 0
    namespace: Annotated[str, Meta(description="Tenant or routing group")] = ""
    block_size: Annotated[int, Meta(ge=0, description="Tokens per block; 0 = learn")] = 0
    engine: Annotated[str, Meta(description="Informative: vllm, sglang, ...")] = ""
    role: Annotated[RoleName, Meta(description="What the worker serves")] = "MIXED"
    kv_layout: Annotated[str, Meta(description='LBHNC, ...; "" = unknown')] = ""
    tp_size: Annotated[int, Meta(ge=0, description="Tensor-parallel size; 0 = unknown")] = 0
    num_kv_heads: Annotated[int, Meta(ge=0, description="KV heads; 0 = unknown")] = 0
    labels: Annotated[dict[str, str], Meta(description="Free labels")] = msgspec.field(
        default_factory=dict
    )
    eagle: Annotated[bool, Meta(description="The engine drops the last matched block")] = False
    bind_events: Annotated[bool, Meta(description="Bind kv_events_endpoint ourselves")] = False
    aliases: Annotated[list[str], Meta(description="Other names gateways use")] = msgspec.field(
        default_factory=list
    )
    chunk_size: Annotated[int, Meta(ge=0, description="Tokens per local-attention chunk")] = 0
    reports_reuse: Annotated[bool, Meta(description="Reused blocks are announced again")] = False
    hidden_groups: Annotated[
        bool, Meta(description="Some groups publish nothing: answers are upper bounds")
    ] = False
    instance: Annotated[
        str,
        Meta(description="Names the process behind the address: another one = its cache is new"),
    ] = ""

    def registration(self) -> Registration:
        """The same, as the rest of the daemon keeps it."""
        return msgspec.convert(msgspec.structs.asdict(self), Registration)


class Config(Section, frozen=True, kw_only=True):
    """All settings of the daemon."""

    server: ServerConfig = ServerConfig()
    tls: TlsConfig = msgspec.field(default_factory=TlsConfig)
    auth: AuthConfig = msgspec.field(default_factory=AuthConfig)
    registration: RegistrationConfig = msgspec.field(default_factory=RegistrationConfig)
    ext_proc: ExtProcConfig = ExtProcConfig()
    tokens: TokensConfig = msgspec.field(default_factory=TokensConfig)
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    index: IndexConfig = msgspec.field(default_factory=IndexConfig)
    redis: RedisConfig = RedisConfig()
    ingest: IngestConfig = IngestConfig()
    pick: PickConfig = PickConfig()
    engine_metrics: EngineMetricsConfig = EngineMetricsConfig()
    groups: GroupsConfig = msgspec.field(default_factory=GroupsConfig)
    limits: LimitsConfig = LimitsConfig()
    discovery: DiscoveryConfig = msgspec.field(default_factory=DiscoveryConfig)
    workers: Annotated[list[WorkerConfig], Meta(description="Workers registered at start")] = (
        msgspec.field(default_factory=list)
    )


SECTIONS: dict[str, type[Section]] = {
    f.name: f.type
    for f in msgspec.structs.fields(Config)
    if isinstance(f.type, type) and issubclass(f.type, Section)
}
"""Section name -> its struct; all but `workers`."""
