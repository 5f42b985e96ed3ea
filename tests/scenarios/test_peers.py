"""A peer that answers the handshake wrongly, and one that leaves in the middle: nobody else notices."""

from __future__ import annotations

import random
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from quiesce.channel import Listener, Received
from quiesce.core.messages import Address, Fingerprint, Hello, Sampling, Unwelcome, Welcome
from quiesce.lab.cluster import Cluster
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_answered, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZES = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "context_length": 512, "max_total_tokens": 8192}
PROMPT = list(range(10, 60))
PAIR = ("prefill-0", "decode-0")


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def other_layout(mine: Fingerprint) -> Fingerprint:
    return msgspec.structs.replace(mine, page_size=2 * mine.page_size)


Answer = Callable[[Hello, int], "bytes | Welcome | Unwelcome | None"]
WRONG: dict[str, tuple[Answer, int, str]] = {  # what it answers, how the request ends, and the word that says why
    "nothing": (lambda hello, epoch: None, 503, "did not answer"),
    "random bytes": (lambda hello, epoch: secrets.token_bytes(200), 503, "did not answer"),
    "an array of four thousand million": (lambda hello, epoch: b"\xdd\xff\xff\xff\xff", 503, "did not answer"),
    "half a welcome": (lambda hello, epoch: b"\x93\xa7Welcome\xcf", 503, "did not answer"),
    "no version in common": (lambda hello, epoch: Unwelcome(epoch, hello.challenge, "version 9"), 503, "version 9"),
    "another layout": (
        lambda hello, epoch: Welcome(epoch, 0, hello.challenge, 1, 1, other_layout(hello.fingerprint)),
        503,
        "page_size",
    ),
    "no transfer engine that is known here": (
        lambda hello, epoch: Welcome(epoch, 0, hello.challenge, 1, 1, hello.fingerprint),
        503,
        "transfer engine",
    ),
    "a welcome for somebody else": (
        lambda hello, epoch: Welcome(epoch, 0, hello.challenge + 1, 1, 1, hello.fingerprint),
        503,
        "did not answer",
    ),
}


class Impostor:
    """A prefill worker whose key is on the ring and whose answers are wrong."""

    def __init__(self, cluster: Cluster, number: int, answer: Answer) -> None:
        self.keys = cluster._key(f"impostor-{number}")
        bind = f"ipc://{cluster.run_dir}/impostor-{number}.sock"
        self.listener = Listener(cluster.context, bind, self.keys)
        self.address = Address(f"impostor-{number}", 5000 + number, self.listener.endpoint, self.keys.public)
        self.answer = answer

    def turn(self) -> None:
        for received in self.listener.receive():
            if isinstance(received.message, Hello):
                self._answer(received, self.answer(received.message, self.address.epoch))

    def _answer(self, to: Received, what: object) -> None:
        if isinstance(what, bytes):
            self.listener.socket.send_multipart([to.sender, what])
        elif isinstance(what, Welcome | Unwelcome):
            self.listener.send(to.sender, what)


def test_scenario_i61_a_wrong_handshake_ends_its_own_request_and_names_what_differs(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    right = oracle([PROMPT], 400)[0]
    with Cluster(tiny, run_dir, hold_timeout=8.0, **SIZES) as cluster, ExitStack() as stack:
        cluster.spawn("prefill", PAIR[0])
        cluster.spawn("decode", PAIR[1])
        cluster.wait_for(*PAIR)
        streams = [cluster.start(PROMPT, greedy(400), PAIR) for _ in range(4)]
        cluster.until(lambda: all(request.tokens for request in streams), 30, "the streams to run")
        answers = [answer for answer, _, _ in WRONG.values()]
        impostors = [Impostor(cluster, number, answer) for number, answer in enumerate(answers)]
        for one in impostors:
            stack.callback(one.listener.close)
        bad = [cluster.start(PROMPT, greedy(4), PAIR[1:], prefill=one.address) for one in impostors]

        def over() -> bool:
            for one in impostors:
                one.turn()
            return all(request.over for request in bad)

        cluster.until(over, 60, "every wrong handshake to end its request")
        for request, (case, (_, status, why)) in zip(bad, WRONG.items(), strict=True):
            (ended,) = request.ends[PAIR[1]]
            assert (ended.outcome, ended.status) == ("failed", status), (case, ended)
            assert why in ended.reason, (case, ended.reason)
        until_over(cluster, streams, 40)
        assert all(request.tokens == right for request in streams)
        check_idle(cluster, PAIR[1])


GRACE = 15.0
PREFILLS, DECODE = ("prefill-0", "prefill-1"), "decode-0"


LONG = pytest.mark.long
CASES = (pytest.param("in time", marks=LONG), pytest.param("asked twice", marks=LONG), "too short")


@pytest.mark.parametrize("case", CASES)
def test_scenario_h29_a_prefill_that_is_told_to_leave_finishes_or_fails_what_it_has(
    tiny: Path, run_dir: Path, oracle: Oracle, case: str
) -> None:
    draw = random.Random(29)
    prompts = [[draw.randrange(8, 500) for _ in range(450)] for _ in range(16)]
    grace = 0.0 if case == "too short" else 20.0
    with Cluster(tiny, run_dir, hold_timeout=5.0, drain_timeout=grace, max_running=32, **SIZES) as cluster:
        for name in PREFILLS:
            cluster.spawn("prefill", name)
        cluster.spawn("decode", DECODE)
        cluster.wait_for(*PREFILLS, DECODE)
        boot = cluster.inspect(DECODE)["epoch"]
        requests = [cluster.start(p, greedy(12), (PREFILLS[n % 2], DECODE)) for n, p in enumerate(prompts)]
        cluster.until(lambda: any(request.tokens for request in requests), 30, "the first hand-off")
        leaving = cluster.workers[PREFILLS[0]]
        leaving.killed = True  # it may end from now on
        told = time.monotonic()
        for _ in range(2 if case == "asked twice" else 1):
            leaving.process.send_signal(signal.SIGTERM)
        until_answered(cluster, requests, 40)
        cluster.until(lambda: leaving.process.returncode is not None, 60, "it to leave")
        took = time.monotonic() - told
        assert leaving.process.returncode == 0
        expected = oracle(prompts, 12)
        for request, right in zip(requests, expected, strict=True):
            answered = request.outcome == "length"
            assert answered or (request.workers[0] == PREFILLS[0] and case != "in time"), request.ends
            assert request.tokens == (right if answered else right[: len(request.tokens)])
        if case != "in time":
            assert took < 2 + GRACE, f"{took:.1f} s"
        check_idle(cluster, DECODE, seconds=30)
        check_idle(cluster, PREFILLS[1])
        assert cluster.inspect(DECODE)["epoch"] == boot, "decode is alive"
        again = cluster.start(PROMPT, greedy(8), (PREFILLS[1], DECODE))
        until_over(cluster, [again], 30)
        assert again.tokens == oracle([PROMPT], 8)[0]
