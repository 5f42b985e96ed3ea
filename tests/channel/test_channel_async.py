from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from channel_bench import Bench

from quiesce.channel import AsyncLink, AsyncListener, KeyPair, LinkEvent
from quiesce.core.messages import Cancel, Registered

PEER = Path(__file__).with_name("peer_process.py")


def test_both_ends_talk_and_state_is_called_back(bench: Bench) -> None:
    async def story() -> None:
        listener = AsyncListener(bench.context, "tcp://127.0.0.1:*", bench.server)
        states: asyncio.Queue[LinkEvent] = asyncio.Queue()
        link = AsyncLink(bench.context, listener.endpoint, bench.server.public, bench.client, states.put_nowait)
        assert await asyncio.wait_for(states.get(), 30) is LinkEvent.UP
        assert link.is_up
        assert link.send(Cancel(rid="a", reason="b"))
        (received,) = await asyncio.wait_for(listener.receive(), 30)
        assert (received.user, received.message) == (bench.client.public, Cancel(rid="a", reason="b"))
        assert listener.send(received.sender, Registered(router_epoch=5))
        assert await asyncio.wait_for(link.receive(), 30) == [Registered(router_epoch=5)]
        listener.close()
        assert await asyncio.wait_for(states.get(), 30) is LinkEvent.DOWN
        assert not link.send(Registered(router_epoch=6))
        assert link.dropped == 1
        link.close()

    asyncio.run(story())


def test_many_messages_arrive_all_and_in_order_while_the_reader_also_sends(bench: Bench) -> None:
    async def story() -> None:
        listener = AsyncListener(bench.context, "tcp://127.0.0.1:*", bench.server)
        up = asyncio.Event()
        link = AsyncLink(bench.context, listener.endpoint, bench.server.public, bench.client, lambda _: up.set())
        await asyncio.wait_for(up.wait(), 30)

        async def echo() -> None:
            while True:
                for received in await listener.receive(limit=7):
                    assert listener.send(received.sender, received.message)

        echoing = asyncio.create_task(echo())
        back: list[int] = []
        for number in range(500):
            assert link.send(Registered(router_epoch=number))
        while len(back) < 500:
            for message in await asyncio.wait_for(link.receive(limit=3), 30):
                assert isinstance(message, Registered)
                back.append(message.router_epoch)
        assert back == list(range(500))
        echoing.cancel()
        link.close()
        listener.close()

    asyncio.run(story())


def test_malformed_input_is_counted_and_the_wait_goes_on(bench: Bench) -> None:
    async def story() -> None:
        listener = AsyncListener(bench.context, "tcp://127.0.0.1:*", bench.server)
        up = asyncio.Event()
        link = AsyncLink(bench.context, listener.endpoint, bench.server.public, bench.client, lambda _: up.set())
        await asyncio.wait_for(up.wait(), 30)
        link.socket.send(b"\xc1junk")
        assert link.send(Registered(router_epoch=1))
        received = await asyncio.wait_for(listener.receive(), 30)
        assert [r.message for r in received] == [Registered(router_epoch=1)]
        assert listener.malformed == 1
        link.close()
        listener.close()

    asyncio.run(story())


def test_more_junk_than_is_read_at_once_hides_no_message(bench: Bench) -> None:
    async def story() -> None:
        listener = AsyncListener(bench.context, "tcp://127.0.0.1:*", bench.server)
        up = asyncio.Event()
        link = AsyncLink(bench.context, listener.endpoint, bench.server.public, bench.client, lambda _: up.set())
        await asyncio.wait_for(up.wait(), 30)
        for _ in range(200):
            link.socket.send(b"\xc1junk")
        assert link.send(Registered(router_epoch=1))
        received = await asyncio.wait_for(listener.receive(limit=1), 30)
        assert [r.message for r in received] == [Registered(router_epoch=1)]
        assert listener.malformed == 200
        link.close()
        listener.close()

    asyncio.run(story())


def test_a_stranger_is_refused(bench: Bench) -> None:
    async def story() -> None:
        listener = AsyncListener(bench.context, "tcp://127.0.0.1:*", bench.server)
        states: asyncio.Queue[LinkEvent] = asyncio.Queue()
        link = AsyncLink(bench.context, listener.endpoint, bench.server.public, KeyPair.generate(), states.put_nowait)
        assert await asyncio.wait_for(states.get(), 30) is LinkEvent.DOWN
        assert not link.send(Registered(router_epoch=1))
        link.close()
        listener.close()

    asyncio.run(story())


def test_a14_a_killed_peer_is_noticed_at_once(bench: Bench) -> None:
    bench.server.save(bench.folder / "peer.key")

    async def story(pid: int, endpoint: str) -> None:
        states: asyncio.Queue[LinkEvent] = asyncio.Queue()
        link = AsyncLink(bench.context, endpoint, bench.server.public, bench.client, states.put_nowait)
        assert await asyncio.wait_for(states.get(), 30) is LinkEvent.UP
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.wait_for(states.get(), 30) is LinkEvent.DOWN
        link.close()

    process = subprocess.Popen([sys.executable, str(PEER), str(bench.folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        asyncio.run(story(process.pid, process.stdout.readline().strip()))
    finally:
        process.kill()
        process.wait()
