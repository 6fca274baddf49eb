"""A subscriber that falls far behind loses frames, not its process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, sys, threading, time
import zmq
from kvindexd.ingest.sockets import new_context
from kvindexd.ingest.transport import Subscriber, SubscriberSettings

publisher = zmq.Context().socket(zmq.PUB)
publisher.setsockopt(zmq.SNDHWM, 0)
port = publisher.bind_to_random_port("tcp://127.0.0.1")
quiet = threading.Event()

def flood():
    for n in range(1_000_000):
        if quiet.wait(0.0005):
            return
        publisher.send_multipart([b"", n.to_bytes(8, "big"), b"x" * 20_000])

async def main():
    settings = SubscriberSettings(
        endpoint=f"tcp://127.0.0.1:{port}", receive_hwm=5, reconnect_min=0.05,
        heartbeat_interval=0.2, heartbeat_timeout=0.4,
    )
    lost = last = 0
    async with Subscriber(settings, new_context(16)) as subscriber:
        thread = threading.Thread(target=flood)
        thread.start()
        deadline = time.monotonic() + 30
        while lost < 3 and time.monotonic() < deadline:
            time.sleep(0.8)  # longer than the heartbeats' patience: the connection is given up
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                delivery = await subscriber.receive(within=0.05)
                lost += sum(event.name == "DISCONNECTED" for event in delivery.links)
                last = max([last, *(frame.seq for frame in delivery.frames)])
        before, end = last, time.monotonic() + 10
        while last <= before and time.monotonic() < end:
            delivery = await subscriber.receive(within=0.2)
            last = max([last, *(frame.seq for frame in delivery.frames)])
        quiet.set()
        thread.join()
    print(lost >= 3, last > before)

asyncio.run(main())
"""


def test_a_slow_subscriber_outlives_lost_connections() -> None:
    """A full queue and a connection that is given up meanwhile: libzmq 3937 ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
    assert done.stdout.split()[-2:] == ["True", "True"], done.stdout[-500:]
