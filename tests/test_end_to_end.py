"""Recorded streams over ZMQ into a running `serve`, answers over gRPC, at every recorded step."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from daemon import Daemon, capture_folder, serving

from kvindexd.testing.conformance import Capture, ProbeRecord
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

ON_EVERY_SERVER = [
    "a_full_attention",
    "b_mla_only",
    "c_kimi768_default",
    "c_kimi768_dense",
    "c_kimi_mini_default",
    "c_kimi_mini_dense_flashkda",
    "d_gptoss_default",
    "d_gptoss_dense",
    "g_sha256_bytes",
    "g_sha256_int",
    "g_xxhash_cbor_bytes",
]
ONCE = [
    "d_gemma3_default",
    "d_gemma4_mixed_block_sizes",
    "d_hma_disabled",
    "d_swa_only",
    "e_chunked_local",
    "h_dp2",
    "i_attn16_mamba64",
    "j_native_offload_placeholder",
    "j_native_offload_selfdesc",
    "k_connect_mode",
    "k_dup_and_evict",
    "k_preemption",
    "k_restart_and_replay",
    "l_dsv4_like",
    "l_unknown_plugin",
    "m_async_gptoss",
    "n_report_full",
    "o_eagle_gptoss_lookahead",
    "o_eagle_lookahead",
    "o_eagle_nolookahead",
    "s_bind_true",
    "s_dp2",
    "s_eagle_ps16",
    "s_full_ps1",
    "s_full_ps16",
    "s_full_ps64",
    "s_fuzz_lag",
    "s_fuzz_ps16",
    "s_hicache_wb",
    "s_hicache_wt",
    "s_legacy_ps16",
    "s_replay_restart",
    "s_session",
]


UNDECIDABLE = [
    "f_lora_salt_mm",
    "f_prompt_embeds",
    "i_kimi_partial_hash",
    "j_simple_cpu_offload",
    "j_simple_cpu_offload_gptoss",
    "s_mamba_ps1",
    "s_ns_default",
    "s_ns_dynamo",
    "s_swa_ps16",
]
"""The wire leaves some of their probes open (docs/exactness.md): over the wire the daemon must
answer what the rules answer in process, which the conformance tests compare with the engine."""


class Playback:
    """A capture played as real publishers into a real daemon, one step at a time."""

    def __init__(self, name: str, daemon: Daemon) -> None:
        self.capture = Capture(capture_folder(name))
        self.daemon = daemon
        self.model = name
        self._at = 0
        self._last: dict[str, int] = {}
        self._restarts: dict[str, int] = {}
        self._engines: dict[str, FakeEngine] = {}
        offline = self.capture.workers()
        for worker, state in offline.items():
            engine = self._engines[worker] = FakeEngine(replay_port=None)
            daemon.register(
                self._id(worker),
                engine.endpoint(),
                model=name,
                eagle=state.options.eagle,
                chunk_size=state.options.chunk_size,
                reports_reuse=name.startswith("n_report"),
            )
            engine.wait_subscribed()

    def _id(self, worker: str) -> str:
        return f"{self.model}-{worker}"

    def close(self) -> None:
        for worker, engine in self._engines.items():
            request = pb.DeregisterWorkerRequest(worker_id=self._id(worker))
            self.daemon.admin.DeregisterWorker(request, timeout=10)
            engine.stop()

    def feed(self, worker: str, seq: int, payload: bytes) -> None:
        """What Capture.play calls for each frame."""
        self._engines[worker].publish_raw("", seq, payload)
        if seq <= self._last.get(worker, -1):
            self._restarts[worker] = self._restarts.get(worker, 0) + 1
        self._last[worker] = seq

    def settle(self) -> None:
        """Until everything published is visible to queries."""
        for worker, seq in self._last.items():
            restarts = self._restarts.get(worker, 0)

            def visible(worker: str = worker, seq: int = seq, n: int = restarts) -> bool:
                seen = self.daemon.worker(self._id(worker))
                return seen.last_seq == seq and seen.counters["restarts"] == n

            self.daemon.until(visible, f"{worker} at {seq} after {restarts} restarts")

    def ask(self, probe: ProbeRecord) -> pb.WorkerScore:
        """ScoreWorkers for one recorded question."""
        prompt = self.capture.prompts[probe.prompt]
        lora = prompt.get("lora")
        items = [
            pb.MultiModalItem(identifier=m[0], offset=m[1], length=m[2])
            for m in prompt.get("mm") or []
        ]
        scores = self.daemon.score(
            self.capture.packed[probe.prompt],
            model=self.model,
            lora_name=(lora[0] if lora else "") or prompt.get("lora_name") or "",
            cache_salt=prompt.get("salt") or prompt.get("cache_salt") or "",
            mm_items=items,
            device_only=probe.device_only,
        )
        return scores[self._id(probe.src)]


class _Feeder:
    """Stands in for the offline worker, so that Capture.play drives the daemon beside it."""

    def __init__(self, playback: Playback, worker: str, offline: Any = None) -> None:
        self._playback, self._worker, self._offline = playback, worker, offline

    def feed(self, seq: int, payload: bytes) -> None:
        self._playback.feed(self._worker, seq, payload)
        if self._offline is not None:
            self._offline.feed(seq, payload)


def play(name: str, daemon: Daemon) -> int:
    """Play a capture; every answer must be the engine's own. Returns the number of probes."""
    playback = Playback(name, daemon)
    try:
        return _compare(name, playback)
    finally:
        playback.close()


def _compare(name: str, playback: Playback) -> int:
    offline = playback.capture.workers()
    feeders: Any = {w: _Feeder(playback, w) for w in offline}
    probes = 0
    settled_at: Any = None
    asked: dict[Any, pb.WorkerScore] = {}
    for probe in playback.capture.play(feeders):
        position = (dict(playback._last), dict(playback._restarts))
        if position != settled_at:
            playback.settle()
            settled_at, asked = position, {}
        key = (probe.src, probe.prompt, probe.device_only)
        if key not in asked:
            asked[key] = playback.ask(probe)
        score = asked[key]
        where = (name, probe, playback._last)
        assert score.reusable_tokens == probe.reusable, where
        total = score.device_tokens + score.host_tokens + score.storage_tokens
        assert total == score.reusable_tokens, where
        if probe.matched is not None:
            align = probe.alignment
            cap = len(playback.capture.packed[probe.prompt]) // 4 - 1
            assert min(score.matched_tokens, cap) // align * align == probe.matched, where
        probes += 1
    assert probes or name == "l_kinds"
    return probes


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon with the embedded store for the whole module."""
    folder = tmp_path_factory.mktemp("embedded")
    with serving(index__data_dir=str(folder)) as daemon:
        yield daemon


@pytest.fixture
def on_each_server(redis_url: str) -> Iterator[Daemon]:
    """A daemon on an empty server of each kind in turn."""
    with serving(redis__url=redis_url) as daemon:
        yield daemon


def test_recorded_streams_give_the_engines_answers_on_every_server(on_each_server: Daemon) -> None:
    for name in ON_EVERY_SERVER:
        play(name, on_each_server)


@pytest.mark.parametrize("name", [*ON_EVERY_SERVER, *ONCE])
def test_recorded_stream_gives_the_engines_answers(name: str, embedded: Daemon) -> None:
    play(name, embedded)


@pytest.mark.parametrize("name", UNDECIDABLE)
def test_the_daemon_answers_what_the_rules_answer_in_process(name: str, embedded: Daemon) -> None:
    playback = Playback(name, embedded)
    try:
        offline = playback.capture.workers()
        feeders: Any = {w: _Feeder(playback, w, state) for w, state in offline.items()}
        settled_at: Any = None
        asked: set[Any] = set()
        for probe in playback.capture.play(feeders):
            position = (dict(playback._last), dict(playback._restarts))
            if position != settled_at:
                playback.settle()
                settled_at, asked = position, set()
            key = (probe.src, probe.prompt, probe.device_only)
            if key in asked:
                continue
            asked.add(key)
            score = playback.ask(probe)
            query = playback.capture.query(probe.prompt)
            expected = offline[probe.src].score(query, hybrid=True, device_only=probe.device_only)
            assert (score.matched_tokens, score.reusable_tokens) == expected, (name, probe)
    finally:
        playback.close()


def test_ten_blocks_and_not_forty_are_counted(embedded: Daemon) -> None:
    playback = Playback("c_kimi768_dense", embedded)
    try:
        for frame in playback.capture.frames[:4]:
            playback.feed(frame["src"], frame["seq"], base64.b64decode(frame["payload"]))
        playback.settle()
        worker = embedded.worker(playback._id("w0"))
        offline = playback.capture.workers()["w0"]
        for frame in playback.capture.frames[:4]:
            offline.feed(frame["seq"], base64.b64decode(frame["payload"]))
        assert worker.blocks["device"] == offline.residency.tier_blocks()[0]
        assert len(worker.groups) == 4
        assert [g.treated_as for g in worker.groups] == ["auxiliary"] * 3 + ["main"]
    finally:
        playback.close()


# -- bad input --------------------------------------------------------------------------------


def stored(
    tokens: list[int], *hashes: int, parent: int | None = None, **more: Any
) -> dict[str, Any]:
    """A BlockStored event of block size 16."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def test_bad_input_costs_itself_and_is_counted_by_reason(embedded: Daemon) -> None:
    good = list(range(16))
    with FakeEngine(replay_port=None) as engine:
        embedded.register("bad", engine.endpoint(), model="bad-input")
        engine.wait_subscribed()
        engine.publish([stored(good, 1)])
        engine.send_parts([b"", b"\0" * 8])
        engine.send_parts([b"", b"\0" * 8, b"x", b"y"])
        engine.send_parts([b"", b"\0" * 7, b"x"])
        engine.publish_raw("", 1, b"\xc1 this is no msgpack")
        engine.publish_raw("", 2, b"\xc0" * 10_000_000)
        engine.publish([stored([-1] * 16, 2), stored(good, 3, block_size=0), {"type": "Novel"}])
        engine.publish([stored(good, 4, 5), stored(list(range(16, 32)), 6, parent=1)])
        worker = embedded.until_seq("bad", 4)
        counters = worker.counters
        assert counters["dropped:bad_parts"] == 2
        assert counters["dropped:bad_seq"] == 1
        assert counters["dropped:bad_payload"] == 2
        assert counters["dropped:bad_token_ids"] == 1
        assert counters["dropped:bad_block_size"] == 1
        assert counters["dropped:unknown_tag"] == 1
        assert counters["dropped:too_many_hashes"] == 1
        score = embedded.score([*range(32), 99], model="bad-input")["bad"]
        assert score.matched_tokens == 32
        embedded.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="bad"), timeout=10)


# -- the API ----------------------------------------------------------------------------------


def code_of(call: Any, *args: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, timeout=10)
    return caught.value.code(), caught.value.details()


def test_status_codes_name_what_is_wrong(embedded: Daemon) -> None:
    ask = embedded.index.ScoreWorkers
    with FakeEngine(replay_port=None) as engine:
        embedded.register("codes", engine.endpoint(), model="codes")

        def prompt(**fields: Any) -> pb.ScoreWorkersRequest:
            return pb.ScoreWorkersRequest(prompt=pb.Prompt(**({"model": "codes"} | fields)))

        code, text = code_of(ask, prompt(token_ids=b"12345"))
        assert (code, "prompt.token_ids" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, text = code_of(ask, prompt())
        assert (code, "no content" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, text = code_of(ask, prompt(model="nope", token_ids=b"1234"))
        assert (code, "codes" in text) == (grpc.StatusCode.NOT_FOUND, True)
        code, text = code_of(ask, prompt(text="hello"))
        assert (code, "tokenizer" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        code, text = code_of(ask, prompt(token_ids=b"1234" * 1_048_577))
        assert (code, "max_prompt_tokens" in text) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        request = prompt(token_ids=b"1234")
        request.options.role = 7
        code, text = code_of(ask, request)
        assert (code, "role" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        response = ask(prompt(token_ids=b"1234"), timeout=10)
        assert [(s.worker_id, s.reusable_tokens) for s in response.scores] == [("codes", 0)]
        embedded.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="codes"), timeout=10)


def test_tokens_packed_tokens_and_client_hashes_agree(embedded: Daemon) -> None:
    from kvindexd import chain

    tokens = [i * 7 % 50_000 for i in range(100)]
    with FakeEngine(replay_port=None) as engine:
        embedded.register("forms", engine.endpoint(), model="forms")
        engine.wait_subscribed()
        engine.publish([stored(tokens[:48], 1, 2, 3)])
        embedded.until_seq("forms", 0)
        hashes = pb.ChainHashes(hashes=chain.prompt_keys(tokens), tokens=len(tokens))
        packed = b"".join(k.to_bytes(8, "little") for k in chain.prompt_keys(tokens))
        forms = [
            pb.Prompt(model="forms", token_ids=chain.pack_tokens(tokens)),
            pb.Prompt(model="forms", tokens=pb.TokenIds(ids=tokens)),
            pb.Prompt(model="forms", chain=hashes),
            pb.Prompt(model="forms", chain=pb.ChainHashes(packed=packed, tokens=100)),
        ]
        requests = [pb.ScoreWorkersRequest(prompt=p) for p in forms]
        one_by_one = [embedded.index.ScoreWorkers(r, timeout=10) for r in requests]
        batch = embedded.index.ScoreWorkersBatch(
            pb.ScoreWorkersBatchRequest(requests=requests), timeout=10
        ).responses
        stream = list(embedded.index.ScoreWorkersStream(iter(requests), timeout=10))
        for response in [*one_by_one, *batch, *stream]:
            assert response.prompt_tokens == 100
            assert [s.reusable_tokens for s in response.scores] == [48]
        embedded.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="forms"), timeout=10)


def test_blocks_can_be_looked_up_and_walked_to_the_root(embedded: Daemon) -> None:
    from kvindexd import chain

    tokens = list(range(1000, 1048))
    keys = chain.prompt_keys(tokens)
    with FakeEngine(replay_port=None) as engine:
        embedded.register("walk", engine.endpoint(), model="walk")
        engine.wait_subscribed()
        engine.publish([stored(tokens, 11, 12, 13)])
        embedded.until_seq("walk", 0)
        block = embedded.admin.GetBlock(pb.GetBlockRequest(hash=keys[2]), timeout=10)
        assert (block.parent, block.depth) == (keys[1], 48)
        assert [(h.worker_id, list(h.tiers), list(h.groups)) for h in block.holders] == [
            ("walk", ["device"], [0])
        ]
        chain_up = embedded.admin.WalkChain(pb.WalkChainRequest(hash=keys[2]), timeout=10)
        assert [b.hash for b in chain_up] == [keys[2], keys[1], keys[0]]
        code, _ = code_of(embedded.admin.GetBlock, pb.GetBlockRequest(hash=5))
        assert code is grpc.StatusCode.NOT_FOUND
        embedded.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="walk"), timeout=10)


def test_explain_says_which_group_stops_the_match_and_where(embedded: Daemon) -> None:
    playback = Playback("c_kimi768_default", embedded)
    try:
        for frame in playback.capture.frames[:2]:
            playback.feed("w0", frame["seq"], base64.b64decode(frame["payload"]))
        playback.settle()
        prompt = pb.Prompt(model=playback.model, token_ids=playback.capture.packed["B"])
        request = pb.ScoreWorkersRequest(prompt=prompt)
        explained = embedded.index.Explain(request, timeout=10).workers[0]
        assert explained.score.matched_tokens == 4608
        assert explained.score.reusable_tokens == 0
        assert "mamba" in explained.score.reason
        by_kind = {g.group.kind: g for g in explained.groups}
        assert by_kind["mla_attention"].held == bytes([1] * 6 + [0])
        assert by_kind["mla_attention"].stops_at == 6
        assert "another group" in by_kind["mla_attention"].why
        assert not any(by_kind["mamba"].held[:6])
        assert "no state is kept" in by_kind["mamba"].why
    finally:
        playback.close()


def test_sigterm_lets_a_call_in_flight_finish_and_exits_clean(tmp_path: Any) -> None:
    with serving(index__data_dir=str(tmp_path)) as daemon, FakeEngine() as engine:
        daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([stored(list(range(16)), 1)])
        daemon.until_seq("w", 0)
        started = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started < 10
        assert [r["event"] for r in daemon.records][-1] == "stopped"
        daemon.start()
        assert daemon.until_seq("w", 0).counters.get("restarts", 0) == 0
        assert daemon.score([*range(16), 1])["w"].matched_tokens == 16
