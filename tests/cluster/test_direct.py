"""Workers without a router's care in front: reused rooms, rooms that nobody else knows, half handshakes, waves."""

from __future__ import annotations

import random
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from quiesce.channel import Link
from quiesce.core.messages import Hello, Register, Sampling, Start
from quiesce.lab.cluster import ROUTER_EPOCH, Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.worker import Faults
from quiesce.roles.decode_peers import MAX_SESSIONS
from quiesce.roles.legs import LONE
from quiesce.roles.prefill import ORPHAN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIR = ("prefill-0", "decode-0")
PROMPT = list(range(10, 60))
QUEUE, PLACES = 64, 8


@pytest.fixture(scope="module")
def pair(tiny: Path) -> Iterator[Cluster]:
    sizes = {"page_size": 16, "chunked_prefill_size": 64, "max_running": PLACES, "max_queued": QUEUE}
    with (
        tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder,
        Cluster(tiny, Path(folder), max_total_tokens=2048, hold_timeout=6.0, **sizes) as cluster,
    ):
        cluster.spawn("prefill", "prefill-0")
        cluster.spawn("decode", "decode-0", Faults(pause=str(cluster.run_dir / "pause")))
        cluster.wait_for(*PAIR)
        yield cluster


def ask(cluster: Cluster, room: int, workers: Sequence[str] = PAIR, tokens: int = 8) -> LabRequest:
    """As `Cluster.start`, with a room of the caller's choice and only the legs that are named."""
    request = LabRequest(secrets.token_hex(8), tuple(PROMPT), tuple(workers), time.monotonic())
    cluster.requests[request.rid] = request
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    for name in workers:
        prefill = cluster.workers["prefill-0"].address if name == "decode-0" else None
        start = Start(request.rid, ROUTER_EPOCH, room, request.prompt, sampling, deadline_ms=30_000, prefill=prefill)
        cluster._send(name, start)
    return request


def finish(cluster: Cluster, *requests: LabRequest) -> None:
    cluster.until(lambda: all(request.over for request in requests), 30, "every leg to end")
    assert all(len(ends) == 1 for request in requests for ends in request.ends.values()), "one last word a leg"


def idle(cluster: Cluster) -> None:
    for name in PAIR:
        cluster.until(lambda name=name: not not_idle(cluster.inspect(name)), 30, f"{name} to be idle")


def test_e40_a_room_in_use_is_refused_and_can_be_used_again(
    pair: Cluster, oracle: Callable[..., list[list[int]]]
) -> None:
    right = oracle([PROMPT], 8)[0]
    pause = pair.run_dir / "pause"
    pause.touch()  # the first is there for as long as the second needs to come
    first, second = ask(pair, room=5, tokens=200), ask(pair, room=5)
    pair.until(lambda: second.over, 30, "the second one's refusal")
    pause.unlink()
    finish(pair, first, second)
    assert first.outcome == "length" and first.tokens == oracle([PROMPT], 200)[0]
    assert second.outcome == "refused" and second.ends["decode-0"][0].status == 409 and not second.tokens

    after_success = ask(pair, room=5)
    finish(pair, after_success)
    assert after_success.tokens == right

    cut = ask(pair, room=5, tokens=400)
    pair.until(lambda: bool(cut.tokens), 30, "a first token")
    pair.cancel(cut)
    after_cancel = ask(pair, room=5)  # the pages of the first may still be held
    finish(pair, cut, after_cancel)
    assert after_cancel.tokens == right, "nothing of the first leaks in"
    idle(pair)


def test_k20_rooms_that_no_prefill_leg_knows_end_and_leave_nothing(
    pair: Cluster, oracle: Callable[..., list[list[int]]]
) -> None:
    boot = {name: pair.inspect(name) for name in PAIR}
    began = time.monotonic()
    fakes = [ask(pair, secrets.randbits(63), ["decode-0"]) for _ in range(600)]
    pair.until(lambda: sum(bool(fake.ends) for fake in fakes) >= 600 - QUEUE, 30, "the surplus to be refused")
    took = time.monotonic() - began
    ended = [fake.ends["decode-0"][0] for fake in fakes if fake.ends]
    lone = [end for end in ended if LONE in end.reason]  # whoever was offered while the others came
    assert len(lone) <= PLACES * (took // ORPHAN_SECONDS)
    assert {(end.outcome, end.status) for end in ended if end not in lone} == {("refused", 503)}
    assert pair.inspect("prefill-0")["offers"] <= PLACES, "an offer for each running place, no more"
    for fake in fakes:
        if not fake.ends:
            pair.cancel(fake)
    finish(pair, *fakes)
    again = ask(pair, secrets.randbits(63))
    finish(pair, again)
    assert again.tokens == oracle([PROMPT], 8)[0]
    idle(pair)
    records = pair.inspect("prefill-0")["records"]
    assert sum(records.values()) < 600, records
    assert all(pair.inspect(name)["epoch"] == boot[name]["epoch"] for name in PAIR)


def cut_wave(cluster: Cluster, draw: random.Random) -> None:
    wave = [ask(cluster, secrets.randbits(63)) for _ in range(QUEUE - 4)]
    began = time.monotonic()
    moments = sorted(draw.uniform(0.2, 0.4) for _ in wave)
    for request, moment in zip(draw.sample(wave, len(wave)), moments, strict=True):
        cluster.until(lambda moment=moment: time.monotonic() - began > moment, 5, "the moment to leave")
        cluster.cancel(request)
        cluster.cancel(request)  # twice is as once
    cluster.until(lambda: all(request.ends.get("decode-0") for request in wave), 30, "decode's last words")
    cluster.kill("prefill-0", signal.SIGCONT)
    finish(cluster, *wave)


def test_j14_waves_of_aborts_while_prefill_is_stopped(pair: Cluster, oracle: Callable[..., list[list[int]]]) -> None:
    draw = random.Random(3)
    epochs = {name: pair.inspect(name)["epoch"] for name in PAIR}
    for _ in range(5):
        pair.kill("prefill-0", signal.SIGSTOP)
        cut_wave(pair, draw)
    again = ask(pair, secrets.randbits(63))
    finish(pair, again)
    assert again.tokens == oracle([PROMPT], 8)[0]
    idle(pair)
    assert {name: pair.inspect(name)["epoch"] for name in PAIR} == epochs


def registered(cluster: Cluster) -> Register:
    """The next heartbeat that arrives."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        cluster.registry.socket.poll(100)
        for received in cluster.registry.receive():
            if isinstance(received.message, Register):
                return received.message
    raise TimeoutError("no heartbeat")


def test_d7_handshakes_that_stop_half_way_keep_nobody_out(
    pair: Cluster, oracle: Callable[..., list[list[int]]]
) -> None:
    keys = pair._key("stranger")
    address = pair.workers["prefill-0"].address
    assert address is not None
    fingerprint = registered(pair).fingerprint
    for _ in range(2):
        links = [Link(pair.context, address.endpoint, address.public_key, keys) for _ in range(150)]
        waiting = set(links)

        def all_have_greeted(waiting: set[Link] = waiting) -> bool:
            for link in list(waiting):
                link.state_changes()
                hello = Hello(secrets.randbits(63) | 1, 0, secrets.randbits(63), 1, 99, fingerprint, b"")
                if link.is_up and link.send(hello):
                    waiting.remove(link)
            return not waiting

        pair.until(all_have_greeted, 30, "the strangers to say hello")
        pair.inspect("prefill-0")  # an answer that comes after the greetings were heard
        for link in links:
            link.close()
    assert pair.inspect("prefill-0")["sessions"] <= MAX_SESSIONS
    pair.kill("decode-0")
    pair.spawn("decode", "decode-0")
    pair.wait_for("decode-0")
    again = ask(pair, secrets.randbits(63))
    finish(pair, again)
    assert again.tokens == oracle([PROMPT], 8)[0]
