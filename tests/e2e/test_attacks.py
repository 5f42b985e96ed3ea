"""Crowds, pauses and strangers: afterwards everything is idle, the next answer is right, and nothing has grown."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from e2e.conftest import QUICK, SIZES, short_folder, warmed
from e2e.product import Product, until
from e2e.streams import Stream
from quiesce.channel import KeyPair
from quiesce.channel.options import configure_link

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROBE = [30, 31, 32, 33]
PROMPTS = [[40 + i] * length for i, length in enumerate((1, 3, 15, 16, 17, 63, 64, 65, 130, 300))]
ANSWER = 40
NOBODY = "no workers can serve this now"
GROWTH = 48  # MiB that a process may gain in one test: kernels are cached by shape, and a crowd brings many shapes


@pytest.fixture(scope="module")
def serve(tiny: Path) -> Iterator[Product]:
    """Its hold timeout is far from three seconds: what stops for so long may be slow to go on."""
    others = [word for word in QUICK if not word.startswith("--hold-timeout")]
    with short_folder() as path, Product(tiny, Path(path), *SIZES, *others, "--hold-timeout=30") as product:
        yield warmed(product)


@pytest.fixture(scope="module")
def answers(serve: Product) -> dict[int, str]:
    """The right answer by the index of its prompt, from an idle server. Then a first crowd: with it decode grows by
    44 MiB, once, and whichever test came first would be taken for a leak."""
    right = {i: serve.ask(prompt, ANSWER) for i, prompt in enumerate(PROMPTS)}
    assert crowd(serve, right, 64, 32, lambda draw: None).right == 64
    serve.check_idle(serve.boot)
    return right


@pytest.fixture
def unharmed(serve: Product, answers: dict[int, str]) -> Iterator[None]:
    """What must hold after every attack."""
    right, before, fds = serve.ask(PROBE), serve.resident(), serve.router_fds()
    epochs = serve.epochs()
    yield
    serve.check_idle(serve.boot)
    assert serve.ask(PROBE) == right
    assert serve.epochs() == epochs, "nobody restarted"
    after = serve.resident()
    grown = {name: after[name] - size for name, size in before.items() if after[name] - size > GROWTH}
    assert not grown, f"MiB gained: {grown}"
    until(lambda: serve.router_fds() <= fds + 2, 30, "the router's descriptors to be given back")


@dataclass
class Tally:
    """What became of a crowd's requests."""

    right: int = 0
    cut: int = 0
    put_off: int = 0  # refused at once while a worker said nothing, and asked again
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


Cut = Callable[[random.Random], float | None]


def crowd(
    serve: Product, answers: dict[int, str], count: int, at_once: int, cut: Cut, seed: int = 5, again: bool = False
) -> Tally:
    """`cut` draws after how many seconds a client leaves; None: it stays. `again`: who is told that nobody can serve
    it now asks again."""
    tally = Tally()
    draw = random.Random(seed)
    plans = [(draw.randrange(len(PROMPTS)), cut(draw)) for _ in range(count)]

    def one(plan: tuple[int, float | None]) -> None:
        index, patience = plan
        stream = Stream(serve, PROMPTS[index], ANSWER)
        with contextlib.closing(stream):
            if patience is not None:
                stream.socket.settimeout(patience)
                with contextlib.suppress(TimeoutError):
                    stream.read_some()
                    time.sleep(patience / 2)
                tally.cut += 1
                return
            stream.to_end()
        if again and stream.status == 503 and NOBODY in str(stream.error):
            tally.put_off += 1
            time.sleep(0.25)
            one(plan)
        elif stream.error is not None or stream.status != 200:
            tally.errors.append(f"{stream.status} {stream.error}")
        elif stream.whole and stream.text == answers[index]:
            tally.right += 1
        else:
            tally.wrong.append(f"{PROMPTS[index][:1]}*{len(PROMPTS[index])}: {stream.text!r}")

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, plans))
    assert not tally.wrong, tally.wrong[:3]
    return tally


def test_two_hundred_streams_leave_at_once(serve: Product, unharmed: None) -> None:
    for _ in range(2):
        streams = [Stream(serve, [40 + i], 1000) for i in range(200)]
        for stream in streams[:10]:
            stream.until_event()
        for stream in streams:
            stream.close()
        serve.check_idle()


def test_three_hundred_requests_give_up_within_fifty_milliseconds(
    serve: Product, answers: dict[int, str], unharmed: None
) -> None:
    tally = crowd(serve, answers, 300, 8, lambda draw: draw.uniform(0.005, 0.05))
    assert tally.cut == 300


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.long)])
def test_many_requests_with_random_cancellations(
    serve: Product, answers: dict[int, str], unharmed: None, count: int
) -> None:
    tally = crowd(serve, answers, count, 24, lambda draw: draw.uniform(0.0, 0.6) if draw.random() < 0.5 else None)
    assert not tally.errors, tally.errors[:3]
    assert tally.right + tally.cut == count and tally.right > 0.4 * count


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
def test_a_process_pauses_three_seconds_under_load(
    serve: Product, answers: dict[int, str], unharmed: None, name: str
) -> None:
    """Who has been let in loses nothing. After four seconds without a heartbeat new requests are refused, and a busy
    machine makes four of three."""
    pid = serve.pid(name)

    def some(draw: random.Random) -> float | None:
        return draw.uniform(0.0, 1.0) if draw.random() < 0.3 else None

    with ThreadPoolExecutor(1) as pool:
        stay_or_leave = pool.submit(crowd, serve, answers, 120, 32, some, again=True)
        time.sleep(0.5)  # it is busy by now; nothing depends on how far it got
        os.kill(pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pid, signal.SIGCONT)
        tally = stay_or_leave.result()
    assert not tally.errors, tally.errors[:3]
    assert tally.right + tally.cut == 120


# ------------------------------------------------------------ strangers at the sockets


def sockets(serve: Product) -> dict[str, str]:
    """Endpoint by file name."""
    (run_dir,) = serve.runtime.iterdir()
    return {path.name: f"ipc://{path}" for path in run_dir.iterdir() if path.is_socket()}


def garbage(draw: random.Random) -> list[bytes]:
    kinds = (
        lambda: [b""],
        lambda: [secrets.token_bytes(draw.randrange(1, 300))],
        lambda: [b"\x93" + secrets.token_bytes(40)],
        lambda: [b"\xdd\xff\xff\xff\xff"],  # an array of four thousand million
        lambda: [b"\x91" * 5000],
        lambda: [b"a", b"b", b"c"],
        lambda: [secrets.token_bytes(100_000)],
    )
    return draw.choice(kinds)()


def shout(endpoint: str, server_key: str, keys: KeyPair | None, times: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        speaker = context.socket(zmq.DEALER)
        if keys is not None:
            configure_link(speaker, server_key, keys)
            speaker.set(zmq.IMMEDIATE, 0)
        speaker.connect(endpoint)
        draw = random.Random(7)
        for _ in range(times):
            with contextlib.suppress(zmq.Again):
                speaker.send_multipart(garbage(draw), zmq.NOBLOCK)
        speaker.poll(500)
    finally:
        context.destroy(linger=500)


def test_garbage_from_strangers_and_from_known_keys_changes_nothing(
    serve: Product, answers: dict[int, str], unharmed: None
) -> None:
    (run_dir,) = serve.runtime.iterdir()
    workers = {name: name.rsplit("-", 1)[0] for name in sockets(serve) if "-" in name}
    control = workers | {"registry": "router"}
    assert set(control.values()) == {"router", "prefill-0", "decode-0"}
    for name, owner in control.items():
        endpoint = sockets(serve)[name]
        public = (run_dir / "keys" / "ring" / f"{owner}.pub").read_text().strip()
        for keys in (None, KeyPair.generate(), KeyPair.load(run_dir / "keys" / "supervisor.key")):
            shout(endpoint, public, keys, 300)
    for endpoint in sockets(serve).values():  # the transfer engines' own included
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            with contextlib.closing(socket.socket(socket.AF_UNIX, kind)) as raw, contextlib.suppress(OSError):
                raw.connect(endpoint.removeprefix("ipc://"))
                for _ in range(20):
                    raw.sendall(secrets.token_bytes(3000))
    assert crowd(serve, answers, 20, 4, lambda draw: None).right == 20


def told(serve: Product, text: bytes, half_closed: bool) -> bytes | None:
    """What the server says before it closes; None: it reset the connection, as when more comes than it reads."""
    with socket.create_connection(("127.0.0.1", serve.port), 30) as raw:
        answer = b""
        try:
            raw.sendall(text)
            if half_closed:
                raw.shutdown(socket.SHUT_WR)
            while more := raw.recv(65536):
                answer += more
        except ConnectionError:
            return answer or None
        return answer


INVALID = "quiesce:router_http_requests_invalid_total"


def test_malformed_http_is_closed_or_refused(serve: Product, unharmed: None) -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: q\r\nContent-Length: "
    before = serve.metrics()[INVALID]
    for text in (b"\0" * 1000, b"GET\r\n\r\n", post + b"-5\r\n\r\n"):
        assert (answer := told(serve, text, False)) and answer.startswith(b"HTTP/1.1 400"), answer
    answer = told(serve, b"A" * 200_000, False)  # most of it is unread when the server closes
    assert answer is None or answer.startswith(b"HTTP/1.1 400"), answer
    assert serve.metrics()[INVALID] - before == 4
    assert told(serve, post + b"50\r\n\r\n{", True) == b"", "nobody is there to hear that half a body came"
