"""Sixty-four decode engines connect to one prefill engine at the same time and leave half way, over and over."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import zmq

from quiesce.channel import KeyPair
from quiesce.core.messages import Address, Sampling
from quiesce.engine.engine import Engine
from quiesce.lab.cluster import Cluster
from quiesce.roles.prefill_peers import PrefillPeer, PrefillPeers
from quiesce.roles.settings import new_epoch
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.choice import Choice
from quiesce.transfer.shm import ShmTransport
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PEERS, ROUNDS = 64, 4
PROBE = list(range(10, 50))
STAGES = ("called", "taken", "ready")


class Caller:
    """A decode engine as far as its sessions go: the real links, handshake and transport, no requests."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_dir: Path, keys: KeyPair, engine: Engine) -> None:
        self.epoch = new_epoch()
        self.transport = Choice([ShmTransport(run_dir, self.epoch)], self.epoch)
        self.transport.register(shared_arena(4, engine.kv.arena.page_bytes))
        self.peers = PrefillPeers(
            context,
            zmq.Poller(),
            keys,
            self.epoch,
            engine.fingerprint,
            self.transport,
            patience=60.0,
        )
        self.peer: PrefillPeer | None = None
        self.seen: set[str] = set()

    def call(self, prefill: Address) -> None:
        self.peer = self.peers.reach(prefill)

    def turn(self) -> None:
        assert self.peer is not None
        self.peers.turn()
        self.transport.events()
        assert self.peer.refusal is None, self.peer.refusal
        reached = (self.peer.hellos > 0, self.peer.taken, self.peers.ready(self.peer))
        self.seen |= {stage for stage, there in zip(STAGES, reached, strict=True) if there}

    def leave(self) -> None:
        self.peers.close()
        self.transport.close_all()


def test_scenario_j91_peers_connect_and_leave_in_a_loop(tiny: Path, run_dir: Path, oracle: Oracle) -> None:
    engine = Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=4, deterministic=True)
    draw = random.Random(91)
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 8, "context_length": 128}
    pair = ("prefill-0", "decode-0")
    with Cluster(tiny, run_dir, max_total_tokens=1024, **sizes) as cluster:
        cluster.spawn("prefill", pair[0])
        cluster.spawn("decode", pair[1])
        cluster.wait_for(*pair)
        right = oracle([PROBE])[0]
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        warm = cluster.start(PROBE, sampling, pair)
        until_over(cluster, [warm], 30)
        boot = cluster.inspect(pair[0])
        prefill = cluster.workers[pair[0]].address
        assert prefill is not None
        keys = cluster._key("callers")
        left: Counter[str] = Counter()
        for _ in range(ROUNDS):
            waiting = {Caller(cluster.context, run_dir, keys, engine): draw.choice(STAGES) for _ in range(PEERS)}
            request = cluster.start(PROBE, sampling, pair)
            for caller in waiting:
                caller.call(prefill)

            def someone_left(waiting: dict[Caller, str] = waiting) -> bool:
                for caller, stage in list(waiting.items()):
                    caller.turn()
                    if stage in caller.seen:
                        left[stage] += 1
                        caller.leave()
                        del waiting[caller]
                return not waiting

            cluster.until(someone_left, 90, "every caller to get as far as it wants to")
            until_over(cluster, [request], 30)
            assert request.tokens == right, "who was there before is served all the time"
        assert set(left) == set(STAGES)
        after = cluster.inspect(pair[0])
        assert (after["epoch"], after["faults"]) == (boot["epoch"], 0)

        def established() -> int:
            now = cluster.inspect(pair[0])
            return int(now["sessions"] - now["half_open"])

        cluster.until(lambda: established() == 1, 30, "the sessions of the dead to go")
        # Of a handshake that stopped half way nothing is known to be dead: those stay until they are in the way. A
        # CONFIRM may be lost when its sender leaves at once.
        assert cluster.inspect(pair[0])["half_open"] <= left["called"] + left["taken"]
        check_idle(cluster, pair[0], 60, {"threads": boot["threads"], "fds": boot["fds"] + 4})
        cluster.spawn("decode", "decode-1")
        cluster.wait_for("decode-1")
        late = cluster.start(PROBE, sampling, (pair[0], "decode-1"))
        until_over(cluster, [late], 30)
        assert late.tokens == right, "a newcomer gets in"
