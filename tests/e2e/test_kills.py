"""kill -9 of every process in turn: clients hear soon, one process restarts, the next answer is right."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from e2e.product import Product, until
from e2e.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HEARD_SECONDS = 30.0  # on any machine; the fault would be the deadline of the request, minutes
BACK_SECONDS = 150.0
LONG = [20 + i % 200 for i in range(1900)]
PROBE = [30, 31, 32, 33]
WORKERS = {"prefill-0", "decode-0"}
LONGEST = 2000  # tokens of an answer that is not to be over before its worker is stopped or dead


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def decoding(product: Product, tokens: int = LONGEST) -> Stream:
    stream = Stream(product, PROBE, tokens)
    stream.until_event()
    return stream


def prefill_begins(product: Product) -> Stream:
    start = product.ledger()["prefill-0"]["prompt_tokens_computed"]
    stream = Stream(product, LONG, 4)
    until(lambda: product.ledger()["prefill-0"]["prompt_tokens_computed"] > start, 30, "prefill to begin")
    return stream


@contextlib.contextmanager
def prefilling(product: Product) -> Iterator[Stream]:
    """One that is not handed over before this is left: nobody moves its pages. A short one would be over already."""
    mover = product.mover()
    os.kill(mover, signal.SIGSTOP)
    try:
        yield prefill_begins(product)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mover, signal.SIGCONT)


def hears(stream: Stream, killed: float) -> None:
    """An error within the time; never the end of a whole answer."""
    stream.socket.settimeout(HEARD_SECONDS)
    stream.to_end()
    assert time.monotonic() - killed < HEARD_SECONDS
    assert stream.error is not None and not stream.whole
    assert stream.status in (200, 500, 502, 503), stream.status


def recovers(product: Product, right: str, before: dict[str, str], restarted: set[str]) -> None:
    def back() -> bool:
        if not product.healthy():
            return False
        now = product.epochs()
        return now.keys() == WORKERS and all(now[name] != before[name] for name in restarted)

    until(back, BACK_SECONDS, f"a new {restarted or 'router'}")
    assert product.ask(PROBE) == right
    after = product.epochs()
    assert {name for name in WORKERS if after[name] != before[name]} == restarted, "nobody else restarts"
    product.check_idle(product.boot)


def test_decode_killed_while_streaming(serve: Product) -> None:
    right, answer, before = serve.ask(PROBE), serve.ask(PROBE, 900), serve.epochs()
    pid = serve.pid("decode-0")
    stream = decoding(serve)
    hears(stream, kill(pid))
    assert stream.text[: len(answer)] == answer[: len(stream.text)]
    recovers(serve, right, before, {"decode-0"})


@pytest.mark.parametrize("victim", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.long)])
def test_worker_killed_while_waiting(serve: Product, victim: str) -> None:
    right, before = serve.ask(PROBE), serve.epochs()
    pid = serve.pid(victim)
    with prefilling(serve) as stream:
        hears(stream, kill(pid))
    recovers(serve, right, before, {victim})


@pytest.mark.long  # a minute with the others, and a cluster of the lab shows it in every run
def test_prefill_killed_while_streaming(serve: Product) -> None:
    right, answer, before = serve.ask(PROBE), serve.ask(PROBE, 900), serve.epochs()
    stream = decoding(serve, 900)
    kill(serve.pid("prefill-0"))
    stream.to_end()  # its pages are in decode already: the answer needs prefill no more
    assert stream.whole and stream.text == answer
    recovers(serve, right, before, {"prefill-0"})


def test_mover_killed_while_streaming_and_while_waiting(serve: Product) -> None:
    """The engine stays; it starts another mover, and what was under way ends with an error or is computed anew."""
    right, answer = serve.ask(PROBE), serve.ask(PROBE, 900)
    before = serve.epochs()
    stream = decoding(serve, 900)
    kill(serve.mover())
    stream.to_end()
    assert stream.whole and stream.text == answer
    recovers(serve, right, before, set())

    mover = serve.mover()
    with prefilling(serve) as stream:
        killed = kill(mover)
        stream.socket.settimeout(HEARD_SECONDS)
        stream.to_end()
    assert time.monotonic() - killed < HEARD_SECONDS
    assert stream.error is not None or stream.whole
    recovers(serve, right, before, set())


def test_router_killed_while_streaming_and_while_waiting(serve: Product) -> None:
    right = serve.ask(PROBE)
    before = serve.epochs()
    router = serve.pid("router")
    answering = decoding(serve)  # its pages are over before the mover stands still
    with prefilling(serve) as waiting:
        streams = [answering, waiting]
        killed = kill(router)
        for stream in streams:
            stream.socket.settimeout(HEARD_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                stream.to_end()
            assert time.monotonic() - killed < HEARD_SECONDS
            assert not stream.whole
    recovers(serve, right, before, set())
