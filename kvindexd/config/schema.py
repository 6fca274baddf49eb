"""The settings: one struct per section of the TOML file. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvindexd.registration import Registration, RoleName

Treatment = Literal["main", "auxiliary", "ignored"]


def default_data_dir() -> str:
    """The user's data folder for kvindexd."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return str(Path(base) / "kvindexd")


def parse_listen(text: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port` (loopback). Raises ValueError, saying why."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ValueError(f"{text!r}: expected host:port (an IPv6 host in brackets)")
    return host.strip("[]") or "127.0.0.1", int(port)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, by keyword, and strict about names."""


class ServerConfig(Section, frozen=True, kw_only=True):
    """The gRPC server."""

    listen: Annotated[str, Meta(description="host:port; port 0 = any, named in the ready line")] = (
        "127.0.0.1:50051"
    )
    max_message_bytes: Annotated[int, Meta(ge=1024, description="Largest gRPC message")] = (
        64 * 1024 * 1024
    )
    grace_seconds: Annotated[
        float, Meta(ge=0, description="Time that running calls get at shutdown")
    ] = 5.0


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


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The HTTP server of /metrics, /healthz and /readyz."""

    listen: Annotated[str, Meta(description='host:port; "" = off')] = "127.0.0.1:9400"


class LogConfig(Section, frozen=True, kw_only=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["json", "console"], Meta(description="One JSON object per line, or text")
    ] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level shown")
    ] = "info"


class IndexConfig(Section, frozen=True, kw_only=True):
    """The index."""

    hybrid: Annotated[
        Literal["exact", "attention-only"],
        Meta(description="Apply every KV-cache group's rule, or the main group's alone"),
    ] = "exact"
    data_dir: Annotated[str, Meta(description="Folder of the embedded Valkey's files")] = (
        msgspec.field(default_factory=default_data_dir)
    )
    unbound_ttl: Annotated[
        float, Meta(gt=0, description="Life of blocks that no engine hash is bound to")
    ] = 60.0


class RedisConfig(Section, frozen=True, kw_only=True):
    """The store."""

    url: Annotated[str, Meta(description='"" = embedded Valkey in index.data_dir')] = ""
    username: Annotated[str, Meta(description="Used when the URL names none")] = ""
    password_file: Annotated[
        str, Meta(description='File that holds the password; "" = the one in the URL, if any')
    ] = ""
    timeout: Annotated[float, Meta(gt=0, description="Limit of one call, connecting included")] = (
        2.0
    )
    pool_size: Annotated[int, Meta(ge=1, description="Connections per process")] = 16
    shards: Annotated[
        int, Meta(ge=1, le=16384, description="Hash slots that workers are spread over")
    ] = 1

    def password(self) -> str:
        """The content of `password_file` without its line end, "" when none is set.

        Raises ConfigError when the file cannot be read.
        """
        if not self.password_file:
            return ""
        try:
            return Path(self.password_file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"redis.password_file: cannot read {self.password_file}: {error}"
            ) from error


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

    def registration(self) -> Registration:
        """The same, as the rest of the daemon keeps it."""
        return msgspec.convert(msgspec.structs.asdict(self), Registration)


class Config(Section, frozen=True, kw_only=True):
    """All settings of the daemon."""

    server: ServerConfig = ServerConfig()
    ext_proc: ExtProcConfig = ExtProcConfig()
    tokens: TokensConfig = msgspec.field(default_factory=TokensConfig)
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    index: IndexConfig = msgspec.field(default_factory=IndexConfig)
    redis: RedisConfig = RedisConfig()
    ingest: IngestConfig = IngestConfig()
    pick: PickConfig = PickConfig()
    engine_metrics: EngineMetricsConfig = EngineMetricsConfig()
    groups: GroupsConfig = msgspec.field(default_factory=GroupsConfig)
    limits: LimitsConfig = LimitsConfig()
    workers: Annotated[list[WorkerConfig], Meta(description="Workers registered at start")] = (
        msgspec.field(default_factory=list)
    )


class ConfigError(ValueError):
    """A setting that cannot be used; the text says which, what was expected and what to do."""


SECTIONS: dict[str, type[Section]] = {
    f.name: f.type
    for f in msgspec.structs.fields(Config)
    if isinstance(f.type, type) and issubclass(f.type, Section)
}
"""Section name -> its struct; all but `workers`."""
