"""Processes of the product that are stopped for longer than the hold timeout, and restarts in every order."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import QUICK, SIZES, short_folder, warmed
from e2e.product import Product, until
from e2e.streams import Stream
from e2e.test_kills import LONG, PROBE, WORKERS, decoding, prefill_begins, prefilling, recovers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOLD = 5.0  # seconds, as the servers of these tests have it
LATE = 15.0  # seconds after it, on any machine; the deadline of a request is minutes
ANSWER = 900  # tokens


@pytest.fixture(scope="module")
def serve(tiny: Path) -> Iterator[Product]:
    """Answers that are compared do not depend on who else is in the batch."""
    with short_folder() as path, Product(tiny, Path(path), *SIZES, *QUICK, "--deterministic") as product:
        yield warmed(product)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[float]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def told(stream: Stream, since: float) -> None:
    """An error once the hold timeout has passed, and not much later."""
    stream.socket.settimeout(HOLD + LATE)
    stream.to_end()
    assert HOLD / 2 < time.monotonic() - since < HOLD + LATE  # the last heartbeat may have come late, or long before
    assert stream.error is not None and not stream.whole


def test_scenario_g37_health_is_red_while_a_worker_is_stopped_and_clients_are_told_after_the_hold_timeout(
    serve: Product,
) -> None:
    right, before = serve.ask(PROBE), serve.epochs()
    for name in sorted(WORKERS):
        pid = serve.pid(name)
        asked = contextlib.nullcontext(decoding(serve)) if name == "decode-0" else prefilling(serve)
        with asked as stream, stopped(pid) as since:
            until(lambda: not serve.healthy(), HOLD + LATE, "health to say so")
            late = serve.http.post("/v1/completions", json={"model": serve.name, "prompt": PROBE, "max_tokens": 1})
            assert late.status_code == 503 and late.headers["retry-after"], "a new request is told at once"
            told(stream, since)
        recovers(serve, right, before, set())


def test_a_router_stopped_beyond_the_hold_timeout_goes_on_where_it_was(serve: Product) -> None:
    right, answer, before = serve.ask(PROBE), serve.ask(PROBE, ANSWER), serve.epochs()
    long_answer = serve.ask(LONG, 4)
    streams = [decoding(serve, ANSWER), prefill_begins(serve)]
    with stopped(serve.pid("router")):
        time.sleep(HOLD + 2.0)  # the length of the pause is what is tested
    for stream, text in zip(streams, (answer, long_answer), strict=True):
        stream.to_end()
        assert stream.whole and stream.text == text
    recovers(serve, right, before, set())


# In every run both signals and every process; the other pairs of them are long.
ENDS = {
    ("prefill-0", signal.SIGTERM): (),
    ("decode-0", signal.SIGTERM): (),
    ("prefill-0+decode-0", signal.SIGKILL): (),
    ("router", signal.SIGTERM): (),
    ("prefill-0", signal.SIGKILL): pytest.mark.long,
    ("decode-0", signal.SIGKILL): pytest.mark.long,
    ("prefill-0+decode-0", signal.SIGTERM): pytest.mark.long,
    ("router", signal.SIGKILL): pytest.mark.long,
}


@pytest.mark.parametrize(
    ("together", "number"),
    [pytest.param(*end, marks=marks, id=f"{end[0]}-{end[1].name}") for end, marks in ENDS.items()],
)
def test_scenario_h7_only_requests_in_flight_fail_when_a_process_restarts_under_its_name(
    serve: Product, together: str, number: signal.Signals
) -> None:
    names = together.split("+")
    right, before = serve.ask(PROBE), serve.epochs()
    for _ in range(4):
        assert serve.ask(PROBE) == right
    pids = [serve.pid(name) for name in names]
    for pid in pids:
        os.kill(pid, number)
    # One that was asked to end still answers for a moment; what is tested is what comes after it.
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60, f"{names} to end")
    recovers(serve, right, before, {name for name in names if name != "router"})
    for _ in range(5):
        assert serve.ask(PROBE) == right
