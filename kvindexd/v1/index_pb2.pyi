import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIXED: _ClassVar[Role]
    PREFILL: _ClassVar[Role]
    DECODE: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[WorkerState]
    LIVE: _ClassVar[WorkerState]
    SYNCING: _ClassVar[WorkerState]
    STALE: _ClassVar[WorkerState]
    DRAINING: _ClassVar[WorkerState]
MIXED: Role
PREFILL: Role
DECODE: Role
UNKNOWN: WorkerState
LIVE: WorkerState
SYNCING: WorkerState
STALE: WorkerState
DRAINING: WorkerState

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChainHashes(_message.Message):
    __slots__ = ("hashes", "unit", "tokens", "packed", "lookahead_packed")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_PACKED_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    unit: int
    tokens: int
    packed: bytes
    lookahead_packed: bytes
    def __init__(self, hashes: _Optional[_Iterable[int]] = ..., unit: _Optional[int] = ..., tokens: _Optional[int] = ..., packed: _Optional[bytes] = ..., lookahead_packed: _Optional[bytes] = ...) -> None: ...

class MultiModalItem(_message.Message):
    __slots__ = ("identifier", "offset", "length")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    offset: int
    length: int
    def __init__(self, identifier: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("model", "namespace", "token_ids", "tokens", "chain", "text", "openai_body", "lora_name", "cache_salt", "mm_items", "openai_path")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OPENAI_BODY_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPENAI_PATH_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    token_ids: bytes
    tokens: TokenIds
    chain: ChainHashes
    text: str
    openai_body: bytes
    lora_name: str
    cache_salt: str
    mm_items: _containers.RepeatedCompositeFieldContainer[MultiModalItem]
    openai_path: str
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., chain: _Optional[_Union[ChainHashes, _Mapping]] = ..., text: _Optional[str] = ..., openai_body: _Optional[bytes] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., mm_items: _Optional[_Iterable[_Union[MultiModalItem, _Mapping]]] = ..., openai_path: _Optional[str] = ...) -> None: ...

class WorkerScore(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "address", "matched_blocks", "matched_tokens", "reusable_tokens", "device_tokens", "host_tokens", "storage_tokens", "predicted_tokens", "active_blocks", "cost", "state", "staleness_ms", "block_size", "reason", "upper_bound")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UPPER_BOUND_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    address: str
    matched_blocks: int
    matched_tokens: int
    reusable_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    predicted_tokens: int
    active_blocks: int
    cost: float
    state: WorkerState
    staleness_ms: int
    block_size: int
    reason: str
    upper_bound: bool
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., address: _Optional[str] = ..., matched_blocks: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., reusable_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., storage_tokens: _Optional[int] = ..., predicted_tokens: _Optional[int] = ..., active_blocks: _Optional[int] = ..., cost: _Optional[float] = ..., state: _Optional[_Union[WorkerState, str]] = ..., staleness_ms: _Optional[int] = ..., block_size: _Optional[int] = ..., reason: _Optional[str] = ..., upper_bound: bool = ...) -> None: ...

class ScoreOptions(_message.Message):
    __slots__ = ("overlap_weight", "top_k", "explain", "role", "include_stale", "device_only", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OVERLAP_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STALE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ONLY_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    overlap_weight: float
    top_k: int
    explain: bool
    role: Role
    include_stale: bool
    device_only: bool
    labels: _containers.ScalarMap[str, str]
    def __init__(self, overlap_weight: _Optional[float] = ..., top_k: _Optional[int] = ..., explain: bool = ..., role: _Optional[_Union[Role, str]] = ..., include_stale: bool = ..., device_only: bool = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ScoreWorkersRequest(_message.Message):
    __slots__ = ("prompt", "candidates", "options")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    candidates: _containers.RepeatedScalarFieldContainer[str]
    options: ScoreOptions
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., candidates: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[ScoreOptions, _Mapping]] = ...) -> None: ...

class ScoreWorkersResponse(_message.Message):
    __slots__ = ("scores", "prompt_tokens", "prompt_blocks", "index_revision")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_REVISION_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[WorkerScore]
    prompt_tokens: int
    prompt_blocks: int
    index_revision: str
    def __init__(self, scores: _Optional[_Iterable[_Union[WorkerScore, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., index_revision: _Optional[str] = ...) -> None: ...

class ScoreWorkersBatchRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ScoreWorkersRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ScoreWorkersRequest, _Mapping]]] = ...) -> None: ...

class ScoreWorkersBatchResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[ScoreWorkersResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[ScoreWorkersResponse, _Mapping]]] = ...) -> None: ...

class PickWorkerRequest(_message.Message):
    __slots__ = ("score", "request_id", "lease")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    score: ScoreWorkersRequest
    request_id: str
    lease: _duration_pb2.Duration
    def __init__(self, score: _Optional[_Union[ScoreWorkersRequest, _Mapping]] = ..., request_id: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PickWorkerResponse(_message.Message):
    __slots__ = ("worker", "fallbacks", "request_id", "prompt_tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerScore
    fallbacks: _containers.RepeatedCompositeFieldContainer[WorkerScore]
    request_id: str
    prompt_tokens: int
    def __init__(self, worker: _Optional[_Union[WorkerScore, _Mapping]] = ..., fallbacks: _Optional[_Iterable[_Union[WorkerScore, _Mapping]]] = ..., request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class CompleteRequestRequest(_message.Message):
    __slots__ = ("request_id", "cached_tokens", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    cached_tokens: int
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class CompleteRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Group(_message.Message):
    __slots__ = ("idx", "kind", "block_size", "sliding_window", "treated_as", "stores")
    IDX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    TREATED_AS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    idx: int
    kind: str
    block_size: int
    sliding_window: int
    treated_as: str
    stores: int
    def __init__(self, idx: _Optional[int] = ..., kind: _Optional[str] = ..., block_size: _Optional[int] = ..., sliding_window: _Optional[int] = ..., treated_as: _Optional[str] = ..., stores: _Optional[int] = ...) -> None: ...

class GroupRun(_message.Message):
    __slots__ = ("group", "held", "stops_at", "why")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    STOPS_AT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    group: Group
    held: bytes
    stops_at: int
    why: str
    def __init__(self, group: _Optional[_Union[Group, _Mapping]] = ..., held: _Optional[bytes] = ..., stops_at: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class WorkerExplanation(_message.Message):
    __slots__ = ("score", "groups")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    score: WorkerScore
    groups: _containers.RepeatedCompositeFieldContainer[GroupRun]
    def __init__(self, score: _Optional[_Union[WorkerScore, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupRun, _Mapping]]] = ...) -> None: ...

class PromptVariation(_message.Message):
    __slots__ = ("change", "detail", "matched_tokens", "workers")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    change: str
    detail: str
    matched_tokens: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, change: _Optional[str] = ..., detail: _Optional[str] = ..., matched_tokens: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ...) -> None: ...

class Divergence(_message.Message):
    __slots__ = ("held_tokens", "before_token", "continuations", "roots", "detail", "variations", "tried", "unknown")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    VARIATIONS_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    before_token: int
    continuations: int
    roots: int
    detail: str
    variations: _containers.RepeatedCompositeFieldContainer[PromptVariation]
    tried: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, held_tokens: _Optional[int] = ..., before_token: _Optional[int] = ..., continuations: _Optional[int] = ..., roots: _Optional[int] = ..., detail: _Optional[str] = ..., variations: _Optional[_Iterable[_Union[PromptVariation, _Mapping]]] = ..., tried: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("workers", "divergence", "prompt_tokens")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerExplanation]
    divergence: Divergence
    prompt_tokens: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerExplanation, _Mapping]]] = ..., divergence: _Optional[_Union[Divergence, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class PairWorkersRequest(_message.Message):
    __slots__ = ("prefill", "decode_candidates", "top_k")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    prefill: ScoreWorkersRequest
    decode_candidates: _containers.RepeatedScalarFieldContainer[str]
    top_k: int
    def __init__(self, prefill: _Optional[_Union[ScoreWorkersRequest, _Mapping]] = ..., decode_candidates: _Optional[_Iterable[str]] = ..., top_k: _Optional[int] = ...) -> None: ...

class WorkerPair(_message.Message):
    __slots__ = ("prefill", "decode", "transferable", "reason", "cost")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    prefill: WorkerScore
    decode: WorkerScore
    transferable: bool
    reason: str
    cost: float
    def __init__(self, prefill: _Optional[_Union[WorkerScore, _Mapping]] = ..., decode: _Optional[_Union[WorkerScore, _Mapping]] = ..., transferable: bool = ..., reason: _Optional[str] = ..., cost: _Optional[float] = ...) -> None: ...

class PairWorkersResponse(_message.Message):
    __slots__ = ("pairs",)
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[WorkerPair]
    def __init__(self, pairs: _Optional[_Iterable[_Union[WorkerPair, _Mapping]]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "dp_size", "model", "namespace", "address", "kv_events_endpoint", "replay_endpoint", "topic", "block_size", "engine", "role", "kv_layout", "tp_size", "num_kv_heads", "labels", "eagle", "bind_events", "aliases", "chunk_size", "reports_reuse", "hidden_groups", "instance", "state", "epoch", "revision", "last_seq", "blocks", "groups", "counters", "last_event_ms_ago", "owner", "detail", "engine_load", "source")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    EAGLE_FIELD_NUMBER: _ClassVar[int]
    BIND_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPORTS_REUSE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_GROUPS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LOAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    dp_size: int
    model: str
    namespace: str
    address: str
    kv_events_endpoint: str
    replay_endpoint: str
    topic: str
    block_size: int
    engine: str
    role: Role
    kv_layout: str
    tp_size: int
    num_kv_heads: int
    labels: _containers.ScalarMap[str, str]
    eagle: bool
    bind_events: bool
    aliases: _containers.RepeatedScalarFieldContainer[str]
    chunk_size: int
    reports_reuse: bool
    hidden_groups: bool
    instance: str
    state: WorkerState
    epoch: int
    revision: int
    last_seq: int
    blocks: _containers.ScalarMap[str, int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    counters: _containers.ScalarMap[str, int]
    last_event_ms_ago: int
    owner: str
    detail: str
    engine_load: EngineLoad
    source: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., address: _Optional[str] = ..., kv_events_endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., topic: _Optional[str] = ..., block_size: _Optional[int] = ..., engine: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., kv_layout: _Optional[str] = ..., tp_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., eagle: bool = ..., bind_events: bool = ..., aliases: _Optional[_Iterable[str]] = ..., chunk_size: _Optional[int] = ..., reports_reuse: bool = ..., hidden_groups: bool = ..., instance: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., last_seq: _Optional[int] = ..., blocks: _Optional[_Mapping[str, int]] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., last_event_ms_ago: _Optional[int] = ..., owner: _Optional[str] = ..., detail: _Optional[str] = ..., engine_load: _Optional[_Union[EngineLoad, _Mapping]] = ..., source: _Optional[str] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("running", "waiting", "cache_usage", "age_ms")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    cache_usage: float
    age_ms: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., cache_usage: _Optional[float] = ..., age_ms: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("model", "namespace", "include_stale")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STALE_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    include_stale: bool
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., include_stale: bool = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class GetWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class GetWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class PurgeWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class PurgeWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class ResyncWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class ResyncWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class GetBlockRequest(_message.Message):
    __slots__ = ("hash", "model")
    HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    hash: int
    model: str
    def __init__(self, hash: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "tiers", "groups")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class GetBlockResponse(_message.Message):
    __slots__ = ("hash", "parent", "depth", "holders")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    hash: int
    parent: int
    depth: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, hash: _Optional[int] = ..., parent: _Optional[int] = ..., depth: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class WalkChainRequest(_message.Message):
    __slots__ = ("hash", "model")
    HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    hash: int
    model: str
    def __init__(self, hash: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class IndexStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IndexStatsResponse(_message.Message):
    __slots__ = ("blocks", "entries", "bytes", "per_model", "workers", "store_bytes", "feed_entries", "replica_lag", "index_revision", "server_version")
    class PerModelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PER_MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_LAG_FIELD_NUMBER: _ClassVar[int]
    INDEX_REVISION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    entries: int
    bytes: int
    per_model: _containers.ScalarMap[str, int]
    workers: int
    store_bytes: int
    feed_entries: int
    replica_lag: int
    index_revision: str
    server_version: str
    def __init__(self, blocks: _Optional[int] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., per_model: _Optional[_Mapping[str, int]] = ..., workers: _Optional[int] = ..., store_bytes: _Optional[int] = ..., feed_entries: _Optional[int] = ..., replica_lag: _Optional[int] = ..., index_revision: _Optional[str] = ..., server_version: _Optional[str] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class TailWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("worker_id", "namespace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    namespace: str
    def __init__(self, worker_id: _Optional[str] = ..., namespace: _Optional[str] = ...) -> None: ...

class WorkerAudit(_message.Message):
    __slots__ = ("worker_id", "dp_rank", "namespace", "outcomes", "predicted_tokens", "resting_tokens", "actual_tokens", "prompt_tokens", "over", "under", "miscounted", "window", "window_error", "drifting", "resyncs")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    UNDER_FIELD_NUMBER: _ClassVar[int]
    MISCOUNTED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    WINDOW_ERROR_FIELD_NUMBER: _ClassVar[int]
    DRIFTING_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    dp_rank: int
    namespace: str
    outcomes: int
    predicted_tokens: int
    resting_tokens: int
    actual_tokens: int
    prompt_tokens: int
    over: int
    under: int
    miscounted: int
    window: int
    window_error: float
    drifting: bool
    resyncs: int
    def __init__(self, worker_id: _Optional[str] = ..., dp_rank: _Optional[int] = ..., namespace: _Optional[str] = ..., outcomes: _Optional[int] = ..., predicted_tokens: _Optional[int] = ..., resting_tokens: _Optional[int] = ..., actual_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., over: _Optional[int] = ..., under: _Optional[int] = ..., miscounted: _Optional[int] = ..., window: _Optional[int] = ..., window_error: _Optional[float] = ..., drifting: bool = ..., resyncs: _Optional[int] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAudit]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAudit, _Mapping]]] = ...) -> None: ...

class TailWorkerResponse(_message.Message):
    __slots__ = ("seq", "ts", "type", "group", "kind", "decision", "reason", "blocks", "tokens", "tier", "medium", "block_size", "lora_name")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ts: float
    type: str
    group: int
    kind: str
    decision: str
    reason: str
    blocks: int
    tokens: int
    tier: str
    medium: str
    block_size: int
    lora_name: str
    def __init__(self, seq: _Optional[int] = ..., ts: _Optional[float] = ..., type: _Optional[str] = ..., group: _Optional[int] = ..., kind: _Optional[str] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., tier: _Optional[str] = ..., medium: _Optional[str] = ..., block_size: _Optional[int] = ..., lora_name: _Optional[str] = ...) -> None: ...
