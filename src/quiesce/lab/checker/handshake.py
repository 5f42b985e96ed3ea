"""The handshake searched by itself: who may believe whom, with every old HELLO, WELCOME and CONFIRM still arriving.

Two processes on fixed addresses, each restarted a few times. A message goes to whoever lives at the address. The
rule: nobody goes back from an epoch to one that died before it.
"""

from __future__ import annotations

import pickle
import time
from itertools import count
from typing import Any, NamedTuple

from quiesce.core.fingerprint import Fingerprint
from quiesce.core.messages import Confirm, Hello, Welcome
from quiesce.core.session import Handshake
from quiesce.lab.checker.freeze import freeze
from quiesce.lab.checker.search import Progress, Result
from quiesce.lab.worlds import World

BACK = "nobody goes back to the epoch of a process that died before the one it believes"
ANSWERS = 3  # HELLOs that one process answers: every answer draws a new challenge
SAME = Fingerprint("m", "w", "float32", "page-major", 16, 1024, 1, 1, 16)
WITHOUT = frozenset({"fingerprint", "_draw"})


class Draw:
    """Numbers nobody can guess, counted so that a search is finite: equal states draw equal ones."""

    def __init__(self, epoch: int) -> None:
        self.next = epoch * 100

    def __call__(self) -> int:
        self.next += 1
        return self.next


class Pair(NamedTuple):
    decode: bytes  # pickled Handshake
    prefill: bytes
    net: frozenset[Any]
    hellos: int
    restarts: tuple[int, int]  # left, of each


def new(epoch: int) -> bytes:
    return pickle.dumps(Handshake(epoch, 0, SAME, Draw(epoch)))


def key(pair: Pair) -> Any:
    sides = [pickle.loads(side) for side in pair[:2]]
    return (*[(freeze(side, WITHOUT), side._draw.next) for side in sides], pair.net, pair.hellos, pair.restarts)


def search_handshake(world: World, *, progress: Progress | None = None) -> Result:
    """`pings` is how often D says HELLO, `crash_d` and `crash_p` how often each side restarts."""
    result = Result(world)
    began = time.perf_counter()
    first = Pair(new(1), new(11), frozenset(), world.pings, (world.crash_d, world.crash_p))
    came: dict[Any, tuple[Any, str]] = {key(first): (None, "")}
    layer = [first]
    for result.depth in count():
        after = []
        for pair in layer:
            for line, following, broken in _moves(pair):
                result.moves += 1
                found = key(following)
                if broken:
                    result.broken, result.told = BACK, [*_path(came, key(pair)), line]
                elif found not in came:
                    came[found] = (key(pair), line)
                    after.append(following)
                if broken:
                    return _finish(result, came, began)
        layer = after
        result.states = len(came)
        if not layer:
            result.complete = True
            return _finish(result, came, began)
        if progress is not None and not progress(result, len(layer)):
            return _finish(result, came, began)
    raise AssertionError


def _moves(pair: Pair) -> list[tuple[str, Pair, bool]]:
    moves = []
    if pair.hellos:
        decode: Handshake = pickle.loads(pair.decode)
        hello = decode.hello(b"")
        said = f"{_name(decode.epoch)} says HELLO"
        moves.append(
            (said, pair._replace(decode=pickle.dumps(decode), net=pair.net | {hello}, hellos=pair.hellos - 1), False)
        )
    for message in sorted(pair.net, key=repr):  # the same search in every process
        to_decode = isinstance(message, Welcome)
        side: Handshake = pickle.loads(pair.decode if to_decode else pair.prefill)
        if isinstance(message, Hello) and side._draw.next - side.epoch * 100 >= ANSWERS:  # type: ignore[attr-defined]
            continue
        before = side.peer
        answer = _hear(side, message)
        net = pair.net | {answer} if answer is not None else pair.net
        state = pickle.dumps(side)
        heard = pair._replace(decode=state) if to_decode else pair._replace(prefill=state)
        following = heard._replace(net=net)
        line = f"{_name(side.epoch)} hears {type(message).__name__.upper()} from {_name(message.epoch)}"
        line += f" -> says {type(answer).__name__.upper()}" if answer is not None else ""
        took = side.peer is not None and side.peer != before
        line += f", believes {_name(side.peer)} now" if took and side.peer is not None else ""
        moves.append((line, following, took and before is not None and side.peer is not None and side.peer < before))
    for which, epoch in ((0, _epoch(pair.decode)), (1, _epoch(pair.prefill))):
        if pair.restarts[which]:
            left = (pair.restarts[0] - (which == 0), pair.restarts[1] - (which == 1))
            fresh = pair._replace(decode=new(epoch + 1)) if which == 0 else pair._replace(prefill=new(epoch + 1))
            moves.append((f"{_name(epoch)} dies and starts again", fresh._replace(restarts=left), False))
    return moves


def _hear(side: Handshake, message: Hello | Welcome | Confirm) -> Any:
    if isinstance(message, Hello):
        return side.on_hello(message)
    if isinstance(message, Welcome):
        return side.on_welcome(message)
    side.on_confirm(message)
    return None


def _epoch(side: bytes) -> int:
    epoch: int = pickle.loads(side).epoch
    return epoch


def _name(epoch: int) -> str:
    return ("D" if epoch < 10 else "P") + "'" * (epoch % 10 - 1)


def _path(came: dict[Any, tuple[Any, str]], at: Any) -> list[str]:
    lines: list[str] = []
    while at is not None:
        at, line = came[at]
        lines.append(line)
    return [line for line in reversed(lines) if line]


def _finish(result: Result, came: dict[Any, Any], began: float) -> Result:
    result.states = len(came)
    result.seconds = time.perf_counter() - began
    return result
