"""Nothing waits for ever: for a client that left, a peer that is not there, a full pool or a write without end."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiesce.channel import KeyPair
from quiesce.core.messages import Address, Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, CONTEXT, PAGE, Oracle, check_idle, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIR = ("prefill-0", "decode-0")
PROBE = list(range(10, 50))
SIZES = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 32, "context_length": CONTEXT}


def greedy(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def prompts_of(count: int, tokens: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(8, 500) for _ in range(tokens)] for _ in range(count)]


def widest_gap(request: LabRequest, since: float) -> float:
    """Seconds without a message with tokens, from that moment to the last one."""
    times = [since, *(at for at in request.arrivals if at >= since)]
    return max(b - a for a, b in itertools.pairwise(times))


def most_between_two_tokens(request: LabRequest, others: list[LabRequest]) -> int:
    """How many tokens one of the others got while this one got none."""
    pauses = list(itertools.pairwise(request.arrivals))
    return max(sum(a < at < b for at in other.arrivals) for a, b in pauses for other in others)


def test_scenario_c5_cancelled_bursts_leave_nothing_behind_without_traffic(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    """Transfers are slow and requests time out after a second. Afterwards nothing is sent at all: only the clock
    can clean up."""
    hold = 4.0
    with Cluster(tiny, run_dir, hold_timeout=hold, max_total_tokens=4096, **SIZES) as cluster:
        cluster.spawn("prefill", PAIR[0], Faults(ms_per_page=(5, 20)))
        cluster.spawn("decode", PAIR[1])
        cluster.wait_for(*PAIR)
        for burst in range(4):
            requests = [cluster.start(p, greedy(50), PAIR, deadline=1.0) for p in prompts_of(300, 300, burst)]
            leave = time.monotonic() + (0.4, 0.7, 0.9, 1.2)[burst]  # the last burst times out and is cancelled late
            cluster.until(lambda leave=leave: time.monotonic() >= leave, 30, "the clients to leave")
            for request in requests:
                cluster.cancel(request)
        time.sleep(hold + 1.0)  # a window without a single message from the router
        cluster.turn()
        for name in PAIR:
            check_idle(cluster, name, seconds=60.0)
        probe = cluster.start(PROBE, greedy(12), PAIR)
        until_over(cluster, [probe], 30)
        assert probe.tokens == oracle([PROBE])[0]
        assert all([len(ends) for ends in r.ends.values()] == [1, 1] for r in cluster.requests.values())


@pytest.mark.parametrize("conservativeness", [1.0, 0.0], ids=["second waits", "one is retracted"])
def test_scenario_c47_requests_that_together_exceed_the_pool(
    tiny: Path, run_dir: Path, oracle: Oracle, conservativeness: float
) -> None:
    prompt_tokens, answer = 96, 96
    pool = int(1.5 * (prompt_tokens + answer))
    prompts = prompts_of(10, prompt_tokens, 47)
    expected = oracle(prompts, answer)
    sizes = SIZES | {"context_length": prompt_tokens + answer}
    with Cluster(tiny, run_dir, **sizes) as cluster:
        cluster.spawn("prefill", PAIR[0], max_total_tokens=2048)
        cluster.spawn("decode", PAIR[1], max_total_tokens=pool, schedule_conservativeness=conservativeness)
        cluster.wait_for(*PAIR)
        for count in (2, 10):
            requests = [cluster.start(prompt, greedy(answer), PAIR) for prompt in prompts[:count]]
            until_over(cluster, requests, 60)
            assert [request.outcome for request in requests] == ["length"] * count
            assert [request.tokens for request in requests] == expected[:count]
            # The oldest is never the victim: it goes on whatever waits behind it.
            assert most_between_two_tokens(requests[0], requests[1:]) < answer / 4
        retractions = cluster.inspect(PAIR[1])["retractions"]
        assert (retractions > 0) == (conservativeness == 0.0)
        for name in PAIR:
            check_idle(cluster, name)


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def stranger(number: int, endpoint: str) -> Address:
    return Address(f"nobody-{number}", 1000 + number, endpoint, KeyPair.generate().public)


def test_scenario_c49_dead_prefill_addresses_stop_nobodys_tokens(tiny: Path, run_dir: Path, oracle: Oracle) -> None:
    prompts = prompts_of(8, 20, 49)
    expected = oracle(prompts, 480)
    sizes = {"max_total_tokens": 16 * CONTEXT, "hold_timeout": 6.0, **SIZES}
    pause = run_dir / "pause"
    with Cluster(tiny, run_dir, **sizes) as cluster, black_hole() as silent:
        cluster.spawn("prefill", PAIR[0])
        cluster.spawn("decode", PAIR[1], Faults(pause=str(pause)))
        cluster.wait_for(*PAIR)
        boot = cluster.inspect(PAIR[1])
        real = cluster.workers[PAIR[0]].address
        assert real is not None
        undisturbed = [cluster.start(prompt, greedy(480), PAIR) for prompt in prompts]
        until_over(cluster, undisturbed, 60)
        quiet = max(widest_gap(request, request.arrivals[20]) for request in undisturbed)
        pause.touch()  # they have all of their way before them when the bad requests come
        streams = [cluster.start(prompt, greedy(480), PAIR) for prompt in prompts]
        cluster.until(lambda: all(request.tokens for request in streams), 30, "the streams to begin")
        addresses = [
            stranger(1, silent),
            stranger(2, silent),
            stranger(3, f"ipc://{run_dir}/nobody.sock"),
            stranger(4, "tcp://127.0.0.1:1"),
            stranger(5, "tcp://nobody.invalid:99"),
            stranger(6, real.endpoint),  # a living process, but not the one that was named
            Address("renamed", 1007, real.endpoint, real.public_key),
            stranger(8, "carrier-pigeon://roof"),
            stranger(9, ""),
            Address("keyless", 1010, real.endpoint, "no key"),
        ]
        lost = [cluster.start(PROBE, greedy(4), PAIR[1:], deadline=15.0, prefill=at) for at in addresses]
        crowd = [
            cluster.start(PROBE, greedy(4), PAIR[1:], prefill=stranger(100 + n, f"ipc://{run_dir}/nobody-{n}.sock"))
            for n in range(300)
        ]
        pause.unlink()
        bad = time.monotonic()
        until_over(cluster, lost, 60)
        for request in lost:
            (ended,) = request.ends[PAIR[1]]
            assert ended.outcome in ("failed", "refused") and ended.reason, ended
            # Who accepts and says nothing may be a stopped process: that one is waited for until the deadline.
            assert ended.status in (400, 503) or (ended.status == 504 and request in lost[:2]), ended
        until_over(cluster, crowd, 60)
        assert {request.ends[PAIR[1]][0].status for request in crowd} == {503}
        until_over(cluster, streams, 60)
        assert [request.tokens for request in streams] == expected
        # Who waits for one of those addresses waits for its deadline, fifteen seconds.
        longest = max(widest_gap(request, bad) for request in streams)
        assert longest < max(10.0, 4 * quiet), f"{longest:.3f} s without a token; {quiet:.3f} s before"
        again = cluster.start(PROBE, greedy(12), PAIR)
        until_over(cluster, [again], 30)
        assert again.tokens == oracle([PROBE])[0]
        check_idle(cluster, PAIR[1], boot={"threads": boot["threads"], "fds": boot["fds"] + 8})


def test_scenario_c52_a_write_in_progress_for_ever_costs_its_own_request_only(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    prompts = prompts_of(16, 60, 52)
    expected = oracle(prompts, 4)
    with Cluster(tiny, run_dir, hold_timeout=15.0, max_total_tokens=8192, **SIZES) as cluster:
        cluster.spawn("prefill", PAIR[0], Faults(stuck_write=2))
        cluster.spawn("decode", PAIR[1])
        cluster.wait_for(*PAIR)
        until_over(
            cluster, [cluster.start(prompts[0], greedy(4), PAIR)], 60
        )  # the first write; it makes their session
        stuck = cluster.start(prompts[0], greedy(4), PAIR, deadline=8.0)
        cluster.until(lambda: cluster.inspect(PAIR[0])["posts"] == 1, 30, "the write")
        boot = {name: cluster.inspect(name) for name in PAIR}
        requests: list[LabRequest] = []
        for number in range(255):
            free = lambda: sum(not r.over for r in requests[-64:]) < 64  # noqa: E731
            cluster.until(free, 30, "a request to end")
            requests.append(cluster.start(prompts[number % 16], greedy(4), PAIR))
        until_over(cluster, [*requests, stuck], 60)
        assert [r.tokens for r in requests] == [expected[n % 16] for n in range(255)]
        # Both legs have the deadline; the later of the two may be told of the other's before its own.
        assert ("failed", 504) in [(end.outcome, end.status) for name in PAIR for end in stuck.ends[name]]
        assert stuck.ends[PAIR[1]][0].outcome in ("failed", "cancelled")
        pages = -(-60 // PAGE)
        state = cluster.inspect(PAIR[1])
        if not state["closed_by"].get("fenced"):  # the fence has not come yet: all but those pages is free
            assert state["pages"]["held"] + state["pages"]["retained"] == pages
            assert state["pages"]["free"] == state["pages"]["total"] - pages
        check_idle(cluster, PAIR[1], seconds=60, boot=boot[PAIR[1]])
        closed = cluster.inspect(PAIR[1])["closed_by"]
        assert closed.get("fenced", 0) + closed.get("gone", 0) == 1, "by a fence, not by time"
        # The posting side keeps its own pages under the handle that never ends, and nothing else.
        kept = cluster.inspect(PAIR[0])
        assert kept["posts"] == 1 and kept["pages"]["held"] == pages
        assert kept["pages"]["free"] == kept["pages"]["total"] - pages
        assert kept["threads"] <= boot[PAIR[0]]["threads"]
        probe = cluster.start(PROBE, greedy(12), PAIR)
        until_over(cluster, [probe], 30)
        assert probe.tokens == oracle([PROBE])[0]
