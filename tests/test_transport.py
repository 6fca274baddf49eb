"""Subscription and replay over real sockets: nothing lost, nothing shifted, every state told."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq
from waiting import becomes as until

from kvindexd.ingest.actions import (
    Action,
    Apply,
    AskReplay,
    CancelReplay,
    Lost,
    ReplayOutcome,
    Restarted,
    SequencerConfig,
    SequencerState,
)
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.link import LinkEvent, LinkState
from kvindexd.ingest.replay import ReplayClient, ReplayResult, ReplaySettings
from kvindexd.ingest.sequencer import Sequencer
from kvindexd.ingest.sockets import TransportError, check_endpoint, new_context
from kvindexd.ingest.transport import Subscriber, SubscriberSettings
from kvindexd.testing import EngineProcess, FakeEngine
from kvindexd.testing.engine import free_ports

Context = zmq.Context[zmq.Socket[bytes]]
EVENT = {"type": "AllBlocksCleared"}
PATIENCE = 10.0


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context(128)
    yield context
    context.destroy(linger=0)


def subscriber(context: Context, endpoint: str, **options: Any) -> Subscriber:
    options = {"reconnect_min": 0.02, "reconnect_max": 0.1} | options
    return Subscriber(SubscriberSettings(endpoint=endpoint, **options), context)


class Listener:
    """Receives all the time and keeps what came."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.frames: list[Frame] = []
        self.links: list[LinkEvent] = []

    @property
    def seqs(self) -> list[int]:
        return [f.seq for f in self.frames]

    async def listen(self) -> None:
        while True:
            delivery = await self.subscriber.receive()
            self.frames += delivery.frames
            self.links += delivery.links


@contextlib.asynccontextmanager
async def listening(subscriber: Subscriber) -> AsyncIterator[Listener]:
    async with subscriber:
        listener = Listener(subscriber)
        task = asyncio.create_task(listener.listen())
        try:
            yield listener
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def subscribed(engine: FakeEngine) -> None:
    await asyncio.to_thread(engine.wait_subscribed)


# -- endpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    ["5557", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://::1:5557", "http://h:1", "tcp://h:70000"],
)
def test_an_endpoint_that_is_none_is_refused_with_the_right_form(endpoint: str) -> None:
    with pytest.raises(TransportError, match=r"endpoint '.*'"):
        check_endpoint(endpoint)


def test_a_wildcard_can_be_bound_but_not_connected_to() -> None:
    assert check_endpoint(" tcp://*:5557 ", bind=True) == "tcp://*:5557"
    with pytest.raises(TransportError, match="bind_events"):
        check_endpoint("tcp://*:5557")
    with pytest.raises(TransportError, match="port"):
        check_endpoint("tcp://127.0.0.1:0")
    assert check_endpoint("tcp://[fe80::1%eth0]:5557")
    assert check_endpoint("ipc:///run/engine.sock")


async def test_binding_a_taken_address_names_the_reason(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine:
        second = subscriber(context, engine.endpoint(), bind=True)
        with pytest.raises(TransportError, match=r"cannot bind.*another process"):
            second.open()


# -- delivery ----------------------------------------------------------------------------------


async def test_frames_arrive_in_order_with_topic_time_and_digest(context: Context) -> None:
    with FakeEngine(topic="kv@pod@m") as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            engine.publish([EVENT], ts=12.5)
            engine.publish([EVENT], ts=13.5)
            await until(lambda: len(got.frames) == 2)
            assert got.seqs == [0, 1]
            assert [f.ts for f in got.frames] == [12.5, 13.5]
            assert {f.topic for f in got.frames} == {b"kv@pod@m"}
            assert got.frames[0].digest != got.frames[1].digest
            assert abs(got.frames[0].received_at - time.time()) < PATIENCE


async def test_the_topic_is_a_prefix(context: Context) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint(), topic="kv@a")) as got:
            await subscribed(engine)
            for seq, topic in enumerate(["kv@b@m", "kv@a@m", "", "kv@a"]):
                engine.publish_raw(topic, seq, b"\x92\x00\x90")
            await until(lambda: len(got.frames) == 2)
            assert got.seqs == [1, 3]


async def test_receives_cancelled_all_the_time_lose_nothing(context: Context) -> None:
    total = 5000
    with FakeEngine(replay_port=None) as engine:
        async with subscriber(context, engine.endpoint()) as one:
            waiting = asyncio.create_task(one.receive(PATIENCE))
            await subscribed(engine)
            await waiting
            publishing = asyncio.get_running_loop().run_in_executor(
                None, lambda: [engine.publish([EVENT]) for _ in range(total)]
            )
            seqs: list[int] = []
            cancelled = 0
            deadline = time.monotonic() + PATIENCE
            while len(seqs) < total and time.monotonic() < deadline:
                task = asyncio.create_task(one.receive(max_frames=7))
                await asyncio.sleep(0)
                task.cancel()
                try:
                    seqs += [f.seq for f in (await task).frames]
                except asyncio.CancelledError:
                    cancelled += 1
                    seqs += [f.seq for f in (await one.receive(0.001, max_frames=3)).frames]
            assert len(await publishing) == total
            assert seqs == list(range(total))
            assert cancelled > 10


async def test_a_burst_before_a_silence_is_consumed_whole(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            await asyncio.to_thread(lambda: [engine.publish([EVENT]) for _ in range(10_000)])
            await until(lambda: len(got.frames) == 10_000)
            assert got.seqs == list(range(10_000))


async def test_one_delivery_is_bounded_in_frames_and_bytes(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine:
        async with subscriber(context, engine.endpoint()) as one:
            await asyncio.gather(one.receive(PATIENCE), subscribed(engine))
            for seq in range(100):
                engine.publish_raw("", seq, bytes(1000))
            seqs: list[int] = []
            while len(seqs) < 100:
                bounds = {"max_frames": 10} if len(seqs) < 50 else {"max_bytes": 5000}
                frames = (await one.receive(PATIENCE, **bounds)).frames
                assert len(frames) <= (10 if "max_frames" in bounds else 5)
                seqs += [f.seq for f in frames]
            assert seqs == list(range(100))


async def test_waiting_messages_do_not_spin_the_loop(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine:
        async with subscriber(context, engine.endpoint()) as one:
            await asyncio.gather(one.receive(PATIENCE), subscribed(engine))
            for _ in range(100):
                engine.publish([EVENT])
            began = time.process_time()
            await asyncio.sleep(0.3)  # nobody receives meanwhile
            assert time.process_time() - began < 0.15
            frames = []
            while len(frames) < 100:
                frames += (await one.receive(PATIENCE)).frames


async def test_an_empty_delivery_after_the_time_allowed(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine:
        async with subscriber(context, engine.endpoint()) as one:
            await asyncio.gather(one.receive(PATIENCE), subscribed(engine))
            began = time.monotonic()
            assert await one.receive(0.05) == ([], [], {})
            assert 0.04 < time.monotonic() - began < PATIENCE


async def test_ipv6_literals_work(context: Context) -> None:
    try:
        with sockets.socket(sockets.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with FakeEngine(host="::1") as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0])
        replies, result = await fetch(context, engine.replay_endpoint(), 0)
        assert (replies, result.outcome) == ([0], ReplayOutcome.COMPLETE)


# -- malformed frames --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("one_part", "bad_parts"),
        ("four_parts", "bad_parts"),
        ("short_seq", "bad_seq"),
        ("no_topic", "bad_parts"),
        ("shifted", "bad_seq"),
        ("end_marker", "bad_seq"),
    ],
)
async def test_a_malformed_message_is_counted_and_costs_only_itself(
    context: Context, kind: str, reason: str
) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            engine.publish([EVENT])
            engine.garbage(kind)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0, 1])
            assert got.subscriber.dropped == {reason: 1}
            assert got.subscriber.link.recreated == 0


async def test_a_payload_above_the_limit_is_dropped_not_the_connection(context: Context) -> None:
    with FakeEngine() as engine:
        one = subscriber(context, engine.endpoint(), max_event_bytes=1000)
        async with listening(one) as got:
            await subscribed(engine)
            engine.publish_raw("", 0, bytes(1001))
            engine.publish_raw("", 1, bytes(1000))
            await until(lambda: got.seqs == [1])
            assert one.dropped == {"too_large": 1}
            assert one.link.state is LinkState.CONNECTED


async def test_a_monstrous_payload_costs_the_connection_which_comes_back(context: Context) -> None:
    with FakeEngine() as engine:
        one = subscriber(context, engine.endpoint(), max_event_bytes=1000)
        async with listening(one) as got:
            await subscribed(engine)
            engine.publish_raw("", 0, bytes(5000))
            await until(lambda: one.link.connects == 2, "reconnection")
            assert LinkEvent.RECREATED in got.links, "ZeroMQ itself gives up for good"
            await subscribed(engine)
            engine.publish_raw("", 1, bytes(10))
            await until(lambda: got.seqs == [1])


@pytest.mark.parametrize("kind", ["no_topic", "shifted"])
async def test_shifted_framing_recreates_the_socket(context: Context, kind: str) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            for _ in range(4):
                engine.garbage(kind)
            await until(lambda: LinkEvent.RECREATED in got.links)
            await until(lambda: got.links.count(LinkEvent.CONNECTED) == 2)
            await until(lambda: engine.ranks[0].subscriptions() == 1)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0])
            assert got.subscriber.link.recreated == 1


async def test_shifted_messages_between_good_ones_are_garbage_not_framing(context: Context) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            for _ in range(5):
                for _ in range(3):
                    engine.garbage("no_topic")
                engine.publish([EVENT])
            await until(lambda: got.seqs == [0, 1, 2, 3, 4])
            assert got.subscriber.dropped == {"bad_parts": 15}
            assert got.subscriber.link.recreated == 0


async def test_a_peer_that_only_sends_shifted_frames_does_not_make_us_reconnect_for_ever(
    context: Context,
) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            for _ in range(4):
                engine.garbage("no_topic")
            await until(lambda: got.links.count(LinkEvent.CONNECTED) == 2)
            # The old subscription may still be there: until the new one is, nothing arrives.
            await until(lambda: engine.publish([EVENT]) >= 0 and bool(got.seqs))
            for _ in range(50):
                engine.garbage("no_topic")
            last = engine.publish([EVENT])
            await until(lambda: got.seqs[-1] == last)
            assert got.subscriber.link.recreated == 1
            assert got.subscriber.dropped["bad_parts"] == 54


# -- the connection ----------------------------------------------------------------------------


async def test_never_connected_says_what_may_be_wrong(context: Context) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    async with listening(subscriber(context, endpoint)) as got:
        link = got.subscriber.link
        await until(lambda: link.failed_connects >= 3)
        assert link.state is LinkState.CONNECTING
        assert got.links == [LinkEvent.CONNECT_FAILED], "one line, then a counter"
        words = link.describe(time.time())
        assert "never connected" in words
        assert "refused" in words
        assert "bind_events" in words


async def test_connected_but_silent_is_told_from_never_connected(context: Context) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await until(lambda: got.links == [LinkEvent.CONNECTED])
            link = got.subscriber.link
            assert link.state is LinkState.CONNECTED
            assert link.last_frame_at is None
            assert "no message since" in link.describe(time.time())
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: link.last_frame_at is not None)
            assert "last message" in link.describe(time.time())


async def test_a_peer_that_speaks_something_else_is_reported(context: Context) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 4)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, listening(subscriber(context, f"tcp://127.0.0.1:{port}")) as got:
        link = got.subscriber.link
        await until(lambda: link.failed_handshakes >= 2, "another try")
        assert link.state is LinkState.CONNECTING
        assert LinkEvent.HANDSHAKE_FAILED in got.links
        assert "ZMTP" in link.describe(time.time()) or "handshake" in link.describe(time.time())


async def test_an_engine_that_connects_to_us(context: Context) -> None:
    one = subscriber(context, "tcp://127.0.0.1:*", bind=True)
    async with listening(one) as got:
        assert one.link.state is LinkState.LISTENING
        assert "no publisher" in one.link.describe(time.time())
        port = int(one.endpoint.rpartition(":")[2])
        with FakeEngine(port=port, connect=True) as engine:
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0])
            assert one.link.state is LinkState.CONNECTED
            assert one.link.peers == 1
        await until(lambda: one.link.state is LinkState.DISCONNECTED)


async def test_a_restart_in_place_is_a_reconnection(context: Context) -> None:
    with FakeEngine() as engine:
        async with listening(subscriber(context, engine.endpoint())) as got:
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0])
            await asyncio.to_thread(engine.restart)
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: got.seqs == [0, 0])
            assert got.links == [
                LinkEvent.CONNECTED,
                LinkEvent.DISCONNECTED,
                LinkEvent.CONNECTED,
            ]


async def test_a_killed_engine_is_noticed_and_found_again(context: Context) -> None:
    engine = await asyncio.to_thread(EngineProcess)
    try:
        async with listening(subscriber(context, engine.endpoints[0])) as got:
            await asyncio.to_thread(engine.call, "wait_subscribed")
            engine.call("publish", events=[EVENT])
            await until(lambda: got.seqs == [0])
            engine.kill()
            await until(lambda: got.subscriber.link.state is LinkState.DISCONNECTED)
            await asyncio.to_thread(engine.start)
            await asyncio.to_thread(engine.call, "wait_subscribed")
            engine.call("publish", events=[EVENT])
            await until(lambda: got.seqs == [0, 0])
    finally:
        await asyncio.to_thread(engine.stop)


async def test_a_frozen_engine_is_noticed_by_heartbeats(context: Context) -> None:
    """The kernel still acknowledges: without heartbeats this connection looks fine for ever."""
    engine = await asyncio.to_thread(EngineProcess)
    try:
        one = subscriber(
            context, engine.endpoints[0], heartbeat_interval=0.1, heartbeat_timeout=0.3
        )
        async with listening(one):
            await asyncio.to_thread(engine.call, "wait_subscribed")
            await until(lambda: one.link.state is LinkState.CONNECTED)
            engine.pause()
            await until(lambda: one.link.disconnects >= 1, "disconnection")
            engine.resume()
            await until(lambda: one.link.state is LinkState.CONNECTED, "reconnection")
    finally:
        await asyncio.to_thread(engine.stop)


# -- replay ------------------------------------------------------------------------------------


async def fetch(
    context: Context, endpoint: str, start: int, **options: Any
) -> tuple[list[int], ReplayResult]:
    options = {"reply_timeout": PATIENCE} | options
    client = ReplayClient(ReplaySettings(endpoint=endpoint, **options), context)
    seqs: list[int] = []

    async def deliver(frames: list[Frame]) -> None:
        seqs.extend(f.seq for f in frames)

    return seqs, await client.run(start, deliver)


@pytest.mark.parametrize("mode", ["normal", "untopical"])
async def test_replay_in_both_forms_ends_at_the_marker(context: Context, mode: str) -> None:
    with FakeEngine(topic="t") as engine:
        engine.replay_mode(mode)
        for _ in range(5):
            engine.publish([EVENT])
        seqs, result = await fetch(context, engine.replay_endpoint(), 2)
        assert seqs == [2, 3, 4]
        assert (result.outcome, result.batches) == (ReplayOutcome.COMPLETE, 3)
        seqs, result = await fetch(context, engine.replay_endpoint(), 99)
        assert (seqs, result.outcome) == ([], ReplayOutcome.COMPLETE)


async def test_a_silent_server_costs_the_timeout_and_the_next_request_works(
    context: Context,
) -> None:
    with FakeEngine() as engine:
        engine.publish([EVENT])
        engine.replay_mode("silent")
        endpoint = engine.replay_endpoint()
        seqs, result = await fetch(context, endpoint, 0, reply_timeout=0.3)
        assert (seqs, result.outcome) == ([], ReplayOutcome.TIMEOUT)
        assert 0.25 < result.seconds < PATIENCE
        assert "no answer" in result.detail
        engine.replay_mode("normal")
        assert (await fetch(context, engine.replay_endpoint(), 0))[0] == [0]


async def test_a_reply_cut_short_is_a_timeout_with_what_came(context: Context) -> None:
    with FakeEngine() as engine:
        for _ in range(6):
            engine.publish([EVENT])
        engine.replay_mode("cut")
        seqs, result = await fetch(context, engine.replay_endpoint(), 0, reply_timeout=1.0)
        assert (seqs, result.outcome) == ([0, 1, 2], ReplayOutcome.TIMEOUT)
        assert "then silence" in result.detail


async def test_nobody_there_is_a_timeout(context: Context) -> None:
    nobody = f"tcp://127.0.0.1:{free_ports(1)}"
    _, result = await fetch(context, nobody, 0, reply_timeout=0.2)
    assert result.outcome is ReplayOutcome.TIMEOUT


async def test_the_whole_request_is_bounded_too(context: Context) -> None:
    with FakeEngine() as engine:
        engine.replay_mode("silent")
        endpoint = engine.replay_endpoint()
        _, result = await fetch(context, endpoint, 0, reply_timeout=60.0, total_timeout=0.2)
        assert result.outcome is ReplayOutcome.TIMEOUT
        assert result.seconds < PATIENCE
        for _ in range(10):
            engine.publish([EVENT])
        engine.replay_mode("normal")
        seqs, result = await fetch(context, endpoint, 0, max_batches=4)
        assert (seqs, result.outcome) == ([0, 1, 2, 3], ReplayOutcome.FAILED)


async def test_bad_replies_are_counted_and_passed_over(context: Context) -> None:
    with FakeEngine() as engine:
        engine.publish([EVENT])
        engine.publish_raw("", 1, bytes(5000))
        engine.publish([EVENT])
        seqs, result = await fetch(context, engine.replay_endpoint(), 0, max_event_bytes=4000)
        assert seqs == [0, 2]
        assert result.dropped == {"too_large": 1}


async def test_a_full_buffer_comes_in_bounded_lists_and_a_slow_taker_is_no_silence(
    context: Context,
) -> None:
    with FakeEngine() as engine:
        for _ in range(10_000):
            engine.publish([EVENT])
        settings = ReplaySettings(endpoint=engine.replay_endpoint(), reply_timeout=2.0)
        seqs: list[int] = []
        sizes: list[int] = []

        async def deliver(frames: list[Frame]) -> None:
            if not seqs:
                await asyncio.sleep(2.2)
            seqs.extend(f.seq for f in frames)
            sizes.append(len(frames))

        result = await ReplayClient(settings, context).run(0, deliver, max_frames=100)
        assert result.outcome is ReplayOutcome.COMPLETE
        assert seqs == list(range(10_000))
        assert max(sizes) <= 100


async def test_a_cancelled_replay_leaves_no_socket(context: Context) -> None:
    with FakeEngine() as engine:
        engine.replay_mode("silent")
        task = asyncio.create_task(fetch(context, engine.replay_endpoint(), 0, reply_timeout=60.0))
        await until(lambda: engine.replay_requests() == [0])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A context with an open socket would hang here.
        await asyncio.wait_for(asyncio.to_thread(context.term), PATIENCE)


# -- all together ------------------------------------------------------------------------------


class Follower:
    """The smallest complete consumer: pump, replay and sequencer of one rank, state kept."""

    def __init__(
        self,
        context: Context,
        engine: FakeEngine,
        *,
        replay: bool = True,
        state: SequencerState | None = None,
        reply_timeout: float = PATIENCE,
    ) -> None:
        config = SequencerConfig(replay=replay, backoff_base=0.2, suspect_grace=0.3)
        self.sequencer = Sequencer(config, state)
        self.subscriber = subscriber(context, engine.endpoint())
        self.client = ReplayClient(
            ReplaySettings(endpoint=engine.replay_endpoint(), reply_timeout=reply_timeout), context
        )
        self.inbox: asyncio.Queue[Callable[[float], list[Action]]] = asyncio.Queue(16)
        self.replays: dict[int, asyncio.Task[None]] = {}
        self.applied: list[Frame] = []
        self.restarts: list[Restarted] = []
        self.lost: list[Lost] = []

    @property
    def seqs(self) -> list[int]:
        return [f.seq for f in self.applied]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group, self.subscriber:
            group.create_task(self.pump())
            while True:
                self.do(await self.next(), group)

    async def next(self) -> list[Action]:
        wake = self.sequencer.wake_at
        try:
            async with asyncio.timeout(None if wake is None else max(0, wake - time.monotonic())):
                step = await self.inbox.get()
        except TimeoutError:
            return self.sequencer.tick(time.monotonic())
        return step(time.monotonic())

    async def pump(self) -> None:
        while True:
            delivery = await self.subscriber.receive()
            for event in delivery.links:
                if event is LinkEvent.CONNECTED:
                    await self.inbox.put(self.sequencer.connected)
            for frame in delivery.frames:
                await self.inbox.put(lambda now, f=frame: self.sequencer.live(f, now))

    async def ask(self, request: AskReplay) -> None:
        async def deliver(frames: list[Frame]) -> None:
            for f in frames:
                await self.inbox.put(
                    lambda now, f=f: self.sequencer.replayed(request.request_id, f, now)
                )

        result = await self.client.run(request.start, deliver)
        await self.inbox.put(
            lambda now: self.sequencer.replay_ended(request.request_id, result.outcome, now)
        )

    def do(self, actions: list[Action], group: asyncio.TaskGroup) -> None:
        for action in actions:
            match action:
                case Apply(frame, _):
                    self.applied.append(frame)
                case Restarted():
                    self.restarts.append(action)
                    self.applied.clear()
                case Lost():
                    self.lost.append(action)
                case AskReplay(request, _, _):
                    self.replays[request] = group.create_task(self.ask(action))
                case CancelReplay(request):
                    self.replays.pop(request).cancel()


@contextlib.asynccontextmanager
async def following(
    context: Context, engine: FakeEngine, **options: Any
) -> AsyncIterator[Follower]:
    follower = Follower(context, engine, **options)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_late_joiner_reads_the_buffer_although_the_engine_is_idle(
    context: Context,
) -> None:
    with FakeEngine() as engine:
        for _ in range(7):
            engine.publish([EVENT])
        async with following(context, engine) as f:
            await until(lambda: f.seqs == list(range(7)))
            assert not f.lost


@pytest.mark.parametrize("fault", ["drop", "duplicate", "swap"])
async def test_disorder_on_the_wire_is_repaired(context: Context, fault: str) -> None:
    with FakeEngine() as engine:
        async with following(context, engine) as f:
            await subscribed(engine)
            await until(lambda: not f.sequencer.syncing)
            for i in range(30):
                if i % 7 == 3:
                    {
                        "drop": engine.drop_next,
                        "duplicate": engine.duplicate_next,
                        "swap": engine.swap_next,
                    }[fault]()
                engine.publish([EVENT])
            await until(lambda: f.seqs == list(range(30)))
            assert not f.lost
            assert not f.restarts


async def test_replies_dropped_by_a_full_queue_are_asked_for_again(context: Context) -> None:
    with FakeEngine() as engine:
        engine.replay_mode("holes")
        for _ in range(40):
            engine.publish([EVENT])
        async with following(context, engine) as f:
            await until(lambda: f.seqs == list(range(40)))
            assert not f.lost
            assert not f.restarts
            assert len(engine.replay_requests()) > 1


async def test_a_silent_replay_server_does_not_stop_the_stream(context: Context) -> None:
    with FakeEngine() as engine:
        async with following(context, engine, reply_timeout=1.0) as f:
            await subscribed(engine)
            await until(lambda: not f.sequencer.syncing)
            engine.replay_mode("silent")
            engine.publish([EVENT])
            engine.drop_next()
            for _ in range(3):
                engine.publish([EVENT])
            await until(lambda: f.seqs == [0, 2, 3])
            assert f.lost == [Lost(1, 1, "timeout")]


async def test_a_restarted_engine_starts_anew_even_before_it_speaks(context: Context) -> None:
    with FakeEngine() as engine:
        async with following(context, engine) as f:
            await subscribed(engine)
            for _ in range(4):
                engine.publish([EVENT])
            await until(lambda: f.seqs == [0, 1, 2, 3] and not f.sequencer.syncing)
            await asyncio.to_thread(engine.restart)
            await until(lambda: f.restarts == [Restarted("replay_empty", 3)])
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: f.seqs == [0])


async def test_a_restart_is_seen_without_replay(context: Context) -> None:
    with FakeEngine(replay_port=None) as engine, FakeEngine() as other:
        engine.replay_endpoint = other.replay_endpoint  # type: ignore[method-assign]
        async with following(context, engine, replay=False) as f:
            await subscribed(engine)
            for _ in range(4):
                engine.publish([EVENT])
            await until(lambda: f.seqs == [0, 1, 2, 3])
            await asyncio.to_thread(engine.restart)
            await subscribed(engine)
            engine.publish([EVENT])
            await until(lambda: f.seqs == [0])
            assert f.restarts == [Restarted("sequence_back", 3)]


async def test_our_own_restart_resumes_where_it_stopped(context: Context) -> None:
    with FakeEngine() as engine:
        async with following(context, engine) as f:
            await subscribed(engine)
            for _ in range(10):
                engine.publish([EVENT])
            await until(lambda: len(f.seqs) == 10)
            state = f.sequencer.state()
        for _ in range(5):
            engine.publish([EVENT])
        async with following(context, engine, state=state) as again:
            await until(lambda: again.seqs == [10, 11, 12, 13, 14])
            assert not again.restarts
            assert not again.lost
            assert min(engine.replay_requests()[1:]) <= 9, "it asked for an overlap"


@pytest.mark.parametrize("published", [1, 10, 40])
async def test_both_restarted_is_recognised_wherever_the_new_sequence_stands(
    context: Context, published: int
) -> None:
    with FakeEngine() as engine:
        async with following(context, engine) as f:
            await subscribed(engine)
            for _ in range(10):
                engine.publish([EVENT])
            await until(lambda: len(f.seqs) == 10)
            state = f.sequencer.state()
        await asyncio.to_thread(engine.restart)
        for _ in range(published):
            engine.publish([EVENT])
        async with following(context, engine, state=state) as again:
            await until(lambda: again.seqs == list(range(published)))
            assert len(again.restarts) == 1
            assert not again.lost


async def test_batches_older_than_the_buffer_are_reported_lost(context: Context) -> None:
    with FakeEngine(buffer_steps=4) as engine:
        for _ in range(10):
            engine.publish([EVENT])
        async with following(context, engine) as f:
            await until(lambda: f.seqs == [6, 7, 8, 9])
            assert f.lost == [Lost(0, 5, "not_in_buffer")]
