"""The gRPC contract: names, numbers and types as published; none may ever change."""

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvindexd.v1 import index_pb2, index_pb2_grpc

# One line per message: name -> "number type name, ...". `?` = presence, `*` = repeated.
MESSAGES = {
    "TokenIds": "1 uint32 ids*",
    "ChainHashes": (
        "1 fixed64 hashes*, 2 uint32 unit, 3 uint32 tokens, 4 bytes packed, "
        "5 bytes lookahead_packed"
    ),
    "MultiModalItem": "1 string identifier, 2 uint32 offset, 3 uint32 length",
    "Prompt": (
        "1 string model, 2 string namespace, 3 bytes token_ids?, 4 TokenIds tokens?, "
        "5 ChainHashes chain?, 6 string text?, 7 bytes openai_body?, 8 string lora_name, "
        "9 string cache_salt, 10 MultiModalItem mm_items*, 11 string openai_path"
    ),
    "WorkerScore": (
        "1 string worker_id, 2 uint32 dp_rank, 3 string address, 4 uint32 matched_blocks, "
        "5 uint32 matched_tokens, 6 uint32 reusable_tokens, 7 uint32 device_tokens, "
        "8 uint32 host_tokens, 9 uint32 storage_tokens, 10 uint32 predicted_tokens, "
        "11 uint32 active_blocks, 12 double cost, 13 WorkerState state, 14 uint32 staleness_ms, "
        "15 uint32 block_size, 16 string reason, 17 bool upper_bound"
    ),
    "ScoreOptions": (
        "1 double overlap_weight?, 2 uint32 top_k, 3 bool explain, 4 Role role?, "
        "5 bool include_stale, 6 bool device_only, 7 map<string,string> labels"
    ),
    "ScoreWorkersRequest": "1 Prompt prompt, 2 string candidates*, 3 ScoreOptions options",
    "ScoreWorkersResponse": (
        "1 WorkerScore scores*, 2 uint32 prompt_tokens, 3 uint32 prompt_blocks, "
        "4 string index_revision"
    ),
    "ScoreWorkersBatchRequest": "1 ScoreWorkersRequest requests*",
    "ScoreWorkersBatchResponse": "1 ScoreWorkersResponse responses*",
    "PickWorkerRequest": "1 ScoreWorkersRequest score, 2 string request_id, 3 Duration lease",
    "PickWorkerResponse": (
        "1 WorkerScore worker, 2 WorkerScore fallbacks*, 3 string request_id, "
        "4 uint32 prompt_tokens"
    ),
    "CompleteRequestRequest": (
        "1 string request_id, 2 uint32 cached_tokens?, 3 uint32 prompt_tokens?"
    ),
    "CompleteRequestResponse": "",
    "ExplainResponse": (
        "1 WorkerExplanation workers*, 2 Divergence divergence, 3 uint32 prompt_tokens"
    ),
    "Divergence": (
        "1 uint32 held_tokens, 2 uint32 before_token, 3 uint64 continuations, 4 uint32 roots, "
        "5 string detail, 6 PromptVariation variations*, 7 string tried*, 8 string unknown*"
    ),
    "PromptVariation": (
        "1 string change, 2 string detail, 3 uint32 matched_tokens, 4 string workers*"
    ),
    "WorkerExplanation": "1 WorkerScore score, 2 GroupRun groups*",
    "GroupRun": "1 Group group, 2 bytes held, 3 uint32 stops_at, 4 string why",
    "PairWorkersRequest": (
        "1 ScoreWorkersRequest prefill, 2 string decode_candidates*, 3 uint32 top_k"
    ),
    "WorkerPair": (
        "1 WorkerScore prefill, 2 WorkerScore decode, 3 bool transferable, 4 string reason, "
        "5 double cost"
    ),
    "PairWorkersResponse": "1 WorkerPair pairs*",
    "Worker": (
        "1 string worker_id, 2 uint32 dp_rank, 3 uint32 dp_size, 4 string model, "
        "5 string namespace, 6 string address, 7 string kv_events_endpoint, "
        "8 string replay_endpoint, 9 string topic, 10 uint32 block_size, 11 string engine, "
        "12 Role role, 13 string kv_layout, 14 uint32 tp_size, 15 uint32 num_kv_heads, "
        "16 map<string,string> labels, 17 bool eagle, 18 bool bind_events, 19 string aliases*, "
        "20 uint32 chunk_size, 21 bool reports_reuse, 22 bool hidden_groups, 23 string instance, "
        "30 WorkerState state, 31 uint64 epoch, 32 uint64 revision, 33 int64 last_seq, "
        "34 map<string,uint64> blocks, 35 Group groups*, 36 map<string,uint64> counters, "
        "37 uint64 last_event_ms_ago, 38 string owner, 39 string detail, "
        "40 EngineLoad engine_load, 41 string source"
    ),
    "EngineLoad": "1 uint32 running, 2 uint32 waiting, 3 double cache_usage, 4 uint64 age_ms",
    "AuditRequest": "1 string worker_id, 2 string namespace",
    "WorkerAudit": (
        "1 string worker_id, 2 uint32 dp_rank, 3 string namespace, 4 uint64 outcomes, "
        "5 uint64 predicted_tokens, 6 uint64 resting_tokens, 7 uint64 actual_tokens, "
        "8 uint64 prompt_tokens, 9 uint64 over, 10 uint64 under, 11 uint64 miscounted, "
        "12 uint32 window, 13 double window_error, 14 bool drifting, 15 uint32 resyncs"
    ),
    "AuditResponse": "1 WorkerAudit workers*",
    "Group": (
        "1 uint32 idx, 2 string kind, 3 uint32 block_size, 4 uint32 sliding_window, "
        "5 string treated_as, 6 uint64 stores"
    ),
    "RegisterWorkerRequest": "1 Worker worker",
    "RegisterWorkerResponse": "1 Worker worker",
    "DeregisterWorkerRequest": "1 string worker_id, 2 uint32 dp_rank?, 3 string namespace",
    "DeregisterWorkerResponse": "",
    "ListWorkersRequest": "1 string model, 2 string namespace, 3 bool include_stale",
    "ListWorkersResponse": "1 Worker workers*",
    "GetWorkerRequest": "1 string worker_id, 2 uint32 dp_rank, 3 string namespace",
    "GetWorkerResponse": "1 Worker worker",
    "DrainWorkerRequest": "1 string worker_id, 2 uint32 dp_rank?, 3 string namespace",
    "DrainWorkerResponse": "1 Worker worker",
    "PurgeWorkerRequest": "1 string worker_id, 2 uint32 dp_rank?, 3 string namespace",
    "PurgeWorkerResponse": "1 Worker worker",
    "ResyncWorkerRequest": "1 string worker_id, 2 uint32 dp_rank?, 3 string namespace",
    "ResyncWorkerResponse": "1 Worker worker",
    "GetBlockRequest": "1 fixed64 hash, 2 string model",
    "GetBlockResponse": "1 fixed64 hash, 2 fixed64 parent, 3 uint32 depth, 4 Holder holders*",
    "Holder": "1 string worker_id, 2 uint32 dp_rank, 3 string tiers*, 4 uint32 groups*",
    "WalkChainRequest": "1 fixed64 hash, 2 string model",
    "IndexStatsRequest": "",
    "IndexStatsResponse": (
        "1 uint64 blocks, 2 uint64 entries, 3 uint64 bytes, 4 map<string,uint64> per_model"
    ),
    "WatchWorkersRequest": "",
    "WatchWorkersResponse": "1 Worker worker",
    "TailWorkerRequest": "1 string worker_id, 2 uint32 dp_rank, 3 string namespace",
}

ENUMS = {
    "Role": {"MIXED": 0, "PREFILL": 1, "DECODE": 2},
    "WorkerState": {"UNKNOWN": 0, "LIVE": 1, "SYNCING": 2, "STALE": 3, "DRAINING": 4},
}

SERVICES = {
    "KVIndex": {
        "ScoreWorkers": "ScoreWorkersRequest -> ScoreWorkersResponse",
        "ScoreWorkersStream": "stream ScoreWorkersRequest -> stream ScoreWorkersResponse",
        "ScoreWorkersBatch": "ScoreWorkersBatchRequest -> ScoreWorkersBatchResponse",
        "PickWorker": "PickWorkerRequest -> PickWorkerResponse",
        "CompleteRequest": "CompleteRequestRequest -> CompleteRequestResponse",
        "Explain": "ScoreWorkersRequest -> ExplainResponse",
        "PairWorkers": "PairWorkersRequest -> PairWorkersResponse",
    },
    "KVIndexAdmin": {
        "RegisterWorker": "RegisterWorkerRequest -> RegisterWorkerResponse",
        "DeregisterWorker": "DeregisterWorkerRequest -> DeregisterWorkerResponse",
        "ListWorkers": "ListWorkersRequest -> ListWorkersResponse",
        "GetWorker": "GetWorkerRequest -> GetWorkerResponse",
        "DrainWorker": "DrainWorkerRequest -> DrainWorkerResponse",
        "PurgeWorker": "PurgeWorkerRequest -> PurgeWorkerResponse",
        "ResyncWorker": "ResyncWorkerRequest -> ResyncWorkerResponse",
        "GetBlock": "GetBlockRequest -> GetBlockResponse",
        "WalkChain": "WalkChainRequest -> stream GetBlockResponse",
        "IndexStats": "IndexStatsRequest -> IndexStatsResponse",
        "WatchWorkers": "WatchWorkersRequest -> stream WatchWorkersResponse",
        "TailWorker": "TailWorkerRequest -> stream TailWorkerResponse",
        "Audit": "AuditRequest -> AuditResponse",
    },
}

_KINDS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def _kind(field: FieldDescriptor) -> str:
    if field.message_type and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return f"map<{_kind(entry['key'])},{_kind(entry['value'])}>"
    named = field.message_type or field.enum_type
    return named.name if named else _KINDS[field.type]


def _line(field: FieldDescriptor) -> str:
    kind = _kind(field)
    if kind.startswith("map<"):
        return f"{field.number} {kind} {field.name}"
    mark = "*" if field.is_repeated else "?" if field.containing_oneof else ""
    return f"{field.number} {kind} {field.name}{mark}"


@pytest.mark.parametrize("name", MESSAGES)
def test_message_fields(name: str) -> None:
    fields = index_pb2.DESCRIPTOR.message_types_by_name[name].fields
    lines = [_line(f) for f in sorted(fields, key=lambda f: f.number)]
    promised = MESSAGES[name].split(", ") if MESSAGES[name] else []
    if name == "IndexStatsResponse":
        lines = lines[: len(promised)]  # open ended by contract
    assert lines == promised


def test_no_message_is_left_out_of_the_table() -> None:
    ours = set(index_pb2.DESCRIPTOR.message_types_by_name)
    assert ours - set(MESSAGES) == {"TailWorkerResponse"}


def test_tail_never_carries_tokens() -> None:
    fields = index_pb2.TailWorkerResponse.DESCRIPTOR.fields_by_name
    assert not fields["tokens"].is_repeated
    assert not [f.name for f in fields.values() if f.is_repeated or _kind(f) == "bytes"]


def test_prompt_content_is_one_of() -> None:
    oneof = index_pb2.Prompt.DESCRIPTOR.oneofs_by_name["content"]
    assert [f.name for f in oneof.fields] == ["token_ids", "tokens", "chain", "text", "openai_body"]


@pytest.mark.parametrize("name", ENUMS)
def test_enums(name: str) -> None:
    values = index_pb2.DESCRIPTOR.enum_types_by_name[name].values
    assert {v.name: v.number for v in values} == ENUMS[name]
    assert all(getattr(index_pb2, v.name) == v.number for v in values)


@pytest.mark.parametrize("name", SERVICES)
def test_services(name: str) -> None:
    service = index_pb2.DESCRIPTOR.services_by_name[name]
    assert service.full_name == f"kvindexd.v1.{name}"
    methods = {
        m.name: f"{'stream ' * m.client_streaming}{m.input_type.name}"
        f" -> {'stream ' * m.server_streaming}{m.output_type.name}"
        for m in service.methods
    }
    assert methods == SERVICES[name]
    assert hasattr(index_pb2_grpc, f"{name}Servicer")
