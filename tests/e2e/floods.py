"""Floods against a running server: fake rooms, half handshakes, garbage, half requests, and very many clients.

Run as a program it is `make soak-router`: the full size, with the figures that docs/router.md quotes.
"""

from __future__ import annotations

import contextlib
import re
import resource
import secrets
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import zmq

from e2e.product import Product, until
from e2e.streams import Stream
from quiesce.channel import KeyPair
from quiesce.channel.options import configure_link
from quiesce.core.codec import Codec
from quiesce.core.messages import Address, Ended, Sampling, Start
from tiny_model import make_tiny_llama

GROWTH = 50  # MiB that a process may gain
OPEN_AT_ONCE = 200  # half-open connections that one attacker keeps
CONTEXT = 2048
EVICTED = "quiesce:router_http_heads_evicted_total"
INVALID = "quiesce:router_http_requests_invalid_total"
HEADLESS = 600  # 512 may wait for a request; a few are late


def run_dir(serve: Product) -> Path:
    (folder,) = serve.runtime.iterdir()
    return folder


def control_sockets(serve: Product) -> list[Path]:
    """The registry and every worker's control socket."""
    names = {"registry", *(f"{name}-{epoch}.sock" for name, epoch in serve.epochs().items())}
    return [path for path in run_dir(serve).iterdir() if path.name in names]


def strangers(path: Path, times: int, say: Callable[[], bytes]) -> None:
    """So many connections, each of which says something and then nothing."""
    waiting: deque[socket.socket] = deque()
    for _ in range(times):
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(5.0)
        until(lambda raw=raw: _connected(raw, path), 30, "a place in the queue of connections")
        with contextlib.suppress(OSError):
            raw.sendall(say())
        waiting.append(raw)
        if len(waiting) > OPEN_AT_ONCE:
            waiting.popleft().close()
    for raw in waiting:
        raw.close()


def _connected(raw: socket.socket, path: Path) -> bool:
    try:
        raw.connect(str(path))
    except BlockingIOError:  # more wait than the listener has places for
        return False
    return True


def half_handshake() -> bytes:
    return b"\xff\0\0\0\0\0\0\0\x01\x7f\x03"  # the beginning of a ZMTP greeting


def garbage() -> bytes:
    return secrets.token_bytes(64)


def no_requests(serve: Product, count: int) -> None:
    """Garbage at the HTTP port."""
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", serve.port), 60.0) as raw, contextlib.suppress(OSError):
            raw.sendall(b"\x16\x03\x01" + garbage())
            raw.recv(4096)


def strangers_at_the_mover(serve: Product, count: int) -> None:
    """Garbage at the transfer engine's own socket."""
    (path,) = (path for path in run_dir(serve).iterdir() if re.fullmatch(r"m\w+\.sock", path.name))
    for _ in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw, contextlib.suppress(OSError):
            raw.connect(str(path))
            raw.sendall(garbage())


def all_told(serve: Product, before: dict[str, float], strangers: int, at_the_mover: int) -> bool:
    """Every control socket has counted so many that never became a peer's, and the mover those that it refused."""
    failed: Counter[str] = Counter()
    for name, value in serve.metrics().items():
        if "attach_refused" in name:
            at_the_mover -= int(value - before.get(name, 0))
        if "handshakes_failed" in name:
            where = re.search(r'worker="([^"]+)"', name)
            failed[where[1] if where else "router"] += int(value - before.get(name, 0))
    told = len(failed) == len(control_sockets(serve)) and min(failed.values()) >= strangers
    return told and at_the_mover <= 0


def half_requests(serve: Product, count: int) -> None:
    """All of them open at the same time, each with the beginning of a request, until the oldest had to make room."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    evicted = serve.metrics()[EVICTED]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", serve.port), 60.0))
            with contextlib.suppress(OSError):
                raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: q\r\nX-Slow: ")
        until(lambda: serve.metrics()[EVICTED] - evicted >= count - HEADLESS, 60, "the oldest to make room")


def fake_rooms(serve: Product, count: int) -> Counter[str]:
    """Decode legs with random rooms that no prefill worker hears of, from whoever has the router's key.

    Returns how many ended in which way; each ends exactly once."""
    folder = run_dir(serve)
    epochs = serve.epochs()
    ring = folder / "keys" / "ring"

    def address(name: str) -> Address:
        endpoint = f"ipc://{folder}/{name}-{epochs[name]}.sock"
        return Address(name, int(epochs[name], 16), endpoint, (ring / f"{name}.pub").read_text().strip())

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    codec, ended, outcomes = Codec(), set(), Counter()
    try:
        speaker = context.socket(zmq.DEALER)
        configure_link(speaker, address("decode-0").public_key, KeyPair.load(folder / "keys" / "router.key"))
        speaker.connect(address("decode-0").endpoint)

        def hear(patience_ms: int) -> bool:
            if not speaker.poll(patience_ms):
                return False
            message = codec.decode(speaker.recv())
            assert isinstance(message, Ended) and message.rid not in ended
            ended.add(message.rid)
            outcomes[f"{message.outcome} {message.status}"] += 1
            return True

        for number in range(count):
            start = Start(
                rid=f"fake-{number}",
                router_epoch=77,
                room=secrets.randbits(63),
                token_ids=(5, 6, 7),
                sampling=Sampling(max_tokens=4),
                deadline_ms=1500,
                prefill=address("prefill-0") if number % 2 else None,
            )
            while not speaker.poll(1000, zmq.POLLOUT):
                hear(100)
            speaker.send(codec.encode(start))
            while hear(0):
                pass
        while len(ended) < count and hear(60_000):
            pass
    finally:
        context.destroy(linger=0)
    assert len(ended) == count, f"{count - len(ended)} fake legs never ended: {outcomes}"
    return outcomes


class Steady:
    """One long stream after the other, which must go on whatever happens beside them: the longest pause between two
    pieces. One that finds the queue full of fakes is refused, and asks again."""

    def __init__(self, serve: Product, tokens: int = 1900) -> None:
        self._serve, self._tokens = serve, tokens
        self._over = threading.Event()
        self.longest, self.pieces, self.refused = 0.0, 0, 0
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.closing(Stream(self._serve, [50, 51, 52], self._tokens)) as stream:
                last = None  # its wait in the queue, behind the fakes, is no pause
                while not self._over.is_set() and stream.read_some():
                    now = time.monotonic()
                    self.longest = max(self.longest, now - (last or now))
                    last = now
                    self.pieces += 1
                if stream.status == 200 and not self._over.is_set() and not stream.whole:
                    self.errors.append(stream.error or "cut")
                self.refused += stream.status == 503

    def __enter__(self) -> Steady:
        self._thread.start()
        until(lambda: self.pieces > 3, 60, "the steady stream to begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def no_growth(serve: Product) -> Iterator[dict[str, int]]:
    """Yields a dict that holds, afterwards, the MiB that each process has gained."""
    before, found = serve.resident(), {}
    yield found
    serve.check_idle()
    found.update({name: size - before[name] for name, size in serve.resident().items()})
    assert max(found.values()) < GROWTH, f"MiB gained: {found}"


def flood(serve: Product, rooms: int, connections: int, requests: int) -> dict[str, object]:
    """Figures of one flood: rooms and connections at each control socket, half requests at the HTTP port."""
    right = serve.ask([30, 31, 32])
    counted = serve.metrics()
    began = time.monotonic()
    with no_growth(serve) as gained:
        with Steady(serve) as steady:
            outcomes = fake_rooms(serve, rooms)
            for path in control_sockets(serve):
                strangers(path, connections, half_handshake)
                strangers(path, connections, garbage)
            no_requests(serve, connections)
            strangers_at_the_mover(serve, connections)
            half_requests(serve, requests)
            assert serve.ask([30, 31, 32]) == right
        assert not steady.errors, steady.errors
    until(lambda: all_told(serve, counted, 2 * connections, connections), 60, "every stranger to be counted")
    now = serve.metrics()
    kinds = (
        "handshakes_failed",
        "connections_total",
        "http_heads",
        "requests_invalid",
        "malformed",
        "attach_refused",
    )
    names = [name for name in now if any(kind in name for kind in kinds)]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "fake rooms": dict(outcomes),
        "MiB gained": gained,
        "longest pause of a stream, s": round(steady.longest, 3),
        "pieces of streams meanwhile": steady.pieces,
        "counted": {name: now[name] - counted.get(name, 0) for name in names},
    }


def _alone(serve: Product) -> str:
    """The text of a short request over a connection of its own."""
    asked = {"model": serve.name, "prompt": [30, 31, 32], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{serve.url}/v1/completions", json=asked | {"priority": -1}, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def many_clients(serve: Product, streams: int, short: int) -> dict[str, object]:
    """So many open streams, short requests beside them, then all streams leave at once."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    right = serve.ask([30, 31, 32], 4)
    opened = [Stream(serve, [40 + i % 50], 1500, timeout=120.0) for i in range(streams)]
    until(lambda: serve.metrics()["quiesce:http_inflight"] >= streams, 60, "every stream to be in the server")
    opened[0].until_event()
    began = time.monotonic()
    with ThreadPoolExecutor(min(short, 200)) as pool:
        answers = list(pool.map(lambda _: _alone(serve), range(short)))
    took = time.monotonic() - began
    assert answers == [right] * short
    for stream in opened:
        stream.close()
    left = time.monotonic()
    until(lambda: not serve.busy(), 30, "the idle check")
    return {"short requests, s": round(took, 1), "idle again after, s": round(time.monotonic() - left, 2)}


SIZES = ("--context-length=2048", "--max-total-tokens=131072", "--chunked-prefill-size=256", "--dtype=float32")
CROWD = ("--max-running-requests=1400", "--max-queued-requests=2048", "--max-inflight=2048", "--hold-timeout=20")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder:
        tiny = make_tiny_llama(Path(folder) / "tiny", layers=4, context=CONTEXT)
        with Product(tiny, Path(folder), *SIZES, *CROWD) as serve:
            serve.wait()
            serve.http.timeout = 120.0
            serve.ask([10, 11, 12], tokens=4)
            print("the flood:", flood(serve, rooms=50_000, connections=2_000, requests=5_000), flush=True)
            print("1,000 streams, 200 short requests:", many_clients(serve, 1000, 200), flush=True)


if __name__ == "__main__":
    main()
