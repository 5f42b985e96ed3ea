"""Frames that no peer would send, through the real decoder: random, mutated, cut, too large, lying about sizes.

    python -m quiesce.lab.fuzz --frames 1000000 --seed 7

Nothing may raise, every frame that is no message must be counted, and what decodes goes on to the real machines,
which must not raise either. A fault names the seed and the frame; the same seed makes the same frames.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import typing
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quiesce.channel.frames import Framing
from quiesce.core.borrower import Borrower, LenderUp
from quiesce.core.codec import Codec
from quiesce.core.ledger import Ledger
from quiesce.core.lender import Lender, Publish
from quiesce.core.machine import Heard
from quiesce.core.messages import HandOff, Ping, TransferId, Wire
from quiesce.core.pages import PagePool
from quiesce.core.pull_lender import PullLender
from quiesce.core.pull_reader import PullReader
from quiesce.core.pulling import Ask, ReaderUp

BLOCK = 2000  # frames from one generator; machines are new for each
CORPUS = 8  # valid messages of each kind in a block, twice as many of the hand-off
RECORDS = 64
D, P = 0xD, 0xA
TOO_LARGE = memoryview(bytes(Codec.MAX_BYTES + 4096))
# Headers that claim much: arrays, maps, strings, bytes and extensions of up to 2^32 - 1.
CLAIMS = tuple(
    bytes([head]) + struct.pack(width, size)
    for head, width, most in (
        *((head, ">I", 2**32 - 1) for head in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)),
        *((head, ">H", 2**16 - 1) for head in (0xC5, 0xC8, 0xDA, 0xDC, 0xDE)),
    )
    for size in (most, most // 2 + 1)
)


class Fault(AssertionError):
    """A rule of the decoder is broken."""


@dataclass(slots=True)
class Report:
    seed: int
    frames: Counter[str] = field(default_factory=Counter)  # by kind
    refused: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)  # decoded, by message
    heard: int = 0  # given to machines
    grown: int = 0  # bytes of resident memory after the first tenth
    seconds: float = 0.0

    def text(self) -> str:
        kinds = "\n".join(
            f"  {kind:<10}{self.frames[kind]:>10,} frames{self.refused[kind]:>10,} refused and counted"
            for kind in sorted(self.frames)
        )
        return (
            f"seed {self.seed}: {self.frames.total():,} frames in {self.seconds:.1f} s, {self.refused.total():,} "
            f"refused, each counted; {self.heard:,} went on to the machines; memory grew by "
            f"{self.grown / 2**20:.1f} MiB\n{kinds}"
        )


# ---------------------------------------------------------------- valid messages


PLAIN: dict[Any, Callable[[random.Random], Any]] = {
    int: lambda rng: rng.getrandbits(rng.choice((1, 4, 8, 16, 32, 64))),
    float: lambda rng: rng.uniform(-9, 9),
    str: lambda rng: "aé\u4e16\x00 z"[: rng.randrange(7)],
    bytes: lambda rng: rng.randbytes(rng.randrange(9)),
    bool: lambda rng: rng.random() < 0.5,
    type(None): lambda rng: None,
}


def value_of(kind: Any, rng: random.Random, name: str = "") -> Any:
    """A value of one wire type, from its annotations; ids from a few, so that machines know some of them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if name in ("epoch", "p_epoch"):
        return rng.choice((D, P, D, P, rng.getrandbits(64)))
    if name in ("seq", "rank", "d_rank", "p_rank"):
        return rng.choice((0, 1, 0, 1, 2, 3))
    if kind in PLAIN:
        return PLAIN[kind](rng)
    if origin is typing.Literal:
        return rng.choice(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(value_of(argument, rng) for argument in arguments)
    if origin in (tuple, list):
        return origin(value_of(arguments[0], rng) for _ in range(rng.randrange(5)))
    if origin is dict:
        return {str(i): rng.choice((i, None, "x", [1], {"y": 2})) for i in range(rng.randrange(4))}
    if arguments:
        return value_of(rng.choice(arguments), rng)
    return kind(**{name: value_of(hint, rng, name) for name, hint in _fields(kind)})


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((name, hints[name]) for name in kind.__struct_fields__)


# ---------------------------------------------------------------- frames


def mutated(frame: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, inserted, left out, repeated, or replaced by a header that claims much."""
    out = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(out)) if out else 0
        how = rng.randrange(6)
        if how == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1 and out:
            out[at] = rng.randrange(256)
        elif how == 2:
            out[at:at] = rng.randbytes(rng.randrange(1, 5))
        elif how == 3:
            del out[at : at + rng.randrange(1, 5)]
        elif how == 4:
            out[at:at] = out[at : at + rng.randrange(1, 32)]
        else:
            out[at : at + 1] = rng.choice(CLAIMS)
    return bytes(out)


def nested(rng: random.Random) -> bytes:
    head = rng.choice((b"", b"\x94\xa9Inspected\x01\x90"))
    return head + rng.choice((b"\x91", b"\x81\xa1a")) * rng.randrange(1, 3000)


# kind -> (weight, does it have to be refused)
KINDS: dict[str, tuple[int, bool]] = {
    "valid": (10, False),
    "mutated": (35, False),
    "random": (15, False),
    "tagged": (9, False),
    "truncated": (20, True),
    "trailing": (5, True),
    "claims": (4, False),
    "nested": (1, True),
    "oversized": (1, True),
}


def frame_of(kind: str, valid: bytes, rng: random.Random) -> bytes | memoryview:
    match kind:
        case "mutated":
            return mutated(valid, rng)
        case "random":
            return rng.randbytes(rng.choice((0, 1, 4, 32, 200)))
        case "tagged":  # the right length and name, anything after that
            return valid[: 2 + (valid[1] & 31)] + rng.randbytes(rng.randrange(64))
        case "truncated":
            return valid[: rng.randrange(len(valid))]
        case "trailing":
            return valid + rng.randbytes(rng.randrange(1, 9))
        case "claims":
            return valid[: rng.randrange(len(valid))] + rng.choice(CLAIMS)
        case "nested":
            return nested(rng)
        case "oversized":
            return TOO_LARGE[: Codec.MAX_BYTES + 1 + rng.randrange(4095)]
        case _:
            return valid


class Listeners:
    """The four machines, each with a few transfers under way."""

    def __init__(self, rng: random.Random) -> None:
        def ledger() -> Ledger:
            return Ledger(PagePool(64), PagePool(16, "rows"))

        self.lender, self.reader = Lender(D, ledger()), PullReader(D, ledger())
        self.borrower = Borrower(P, ledger(), max_records=RECORDS)
        self.pull_lender = PullLender(P, ledger(), max_records=RECORDS)
        self.borrower.on(LenderUp(D))
        self.pull_lender.on(ReaderUp(D))
        for _ in range(3):
            ranks = {0: P, 1: P} if rng.random() < 0.3 else {0: P}
            for machine in (self.lender, self.reader):
                tid = machine.reserve(ranks, room=1, pairing=b"p", tokens=16, pages=1)
                assert tid is not None
            for rank in ranks:
                self.lender.on(Publish(TransferId(D, self.lender.high), rank, 0, 1, 1000))
            self.reader.on(Ask(TransferId(D, self.reader.high), 1000))

    def hear(self, message: HandOff | Ping) -> None:
        """As if the epoch that it names had said it: decode to prefill's machines, prefill to decode's."""
        minted = message.epoch if isinstance(message, Ping) else message.leg.tid.epoch
        self.borrower.on(Heard(message, minted))
        self.pull_lender.on(Heard(message, minted))
        if not isinstance(message, Ping):
            self.lender.on(Heard(message, message.leg.p_epoch))
            self.reader.on(Heard(message, message.leg.p_epoch))

    def size(self) -> int:
        return self.borrower.known + len(self.pull_lender.transfers) + len(self.pull_lender.tombstones)


# ---------------------------------------------------------------- the run


def fuzz(frames: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> Report:
    """Raises Fault."""
    report, framing = Report(seed), Framing(None)
    began, resident, first = time.perf_counter(), 0, max(BLOCK, frames // 10)
    for start in range(0, frames, BLOCK):
        if start >= first and not resident:
            resident = _resident()
        _block(start, min(BLOCK, frames - start), report, framing)
        progress(start)
    report.grown = max(0, _resident() - resident) if resident else 0
    report.seconds = time.perf_counter() - began
    if framing.counts.malformed != report.refused.total() or framing.codec.malformed != framing.counts.malformed:
        counted = f"{framing.counts.malformed} counted by the channel, {framing.codec.malformed} by the codec"
        raise Fault(f"{report.refused.total()} frames were refused, {counted}")
    return report


def _block(start: int, size: int, report: Report, framing: Framing) -> None:
    rng = random.Random(f"{report.seed}:{start}")
    encode = msgspec.msgpack.Encoder().encode
    corpus = [encode(value_of(kind, rng)) for kind in typing.get_args(Wire) for _ in range(CORPUS)]
    corpus += [encode(value_of(kind, rng)) for kind in (*typing.get_args(HandOff), Ping) for _ in range(CORPUS)]
    listeners = Listeners(rng)
    kinds = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=size)
    for number, kind in enumerate(kinds, start):
        valid = rng.choice(corpus)
        frame = frame_of(kind, valid, rng)
        try:
            _one(kind, frame, valid, report, framing, listeners)
        except Exception as error:
            shown = bytes(frame[:400]).hex() + (f"... {len(frame)} bytes" if len(frame) > 400 else "")
            raise Fault(f"seed {report.seed}, frame {number}, {kind}: {error!r}; the frame is {shown}") from error


def _one(
    kind: str, frame: bytes | memoryview, valid: bytes, report: Report, framing: Framing, listeners: Listeners
) -> None:
    before = framing.counts.malformed
    message = framing.from_server([zmq.Frame(frame, copy=len(frame) < 65536)])
    counted = framing.counts.malformed - before
    report.frames[kind] += 1
    if message is None:
        report.refused[kind] += 1
        if counted != 1 or kind == "valid":
            raise Fault("a valid frame was refused" if kind == "valid" else f"refused but counted {counted} times")
        return
    if counted or KINDS[kind][1]:
        raise Fault(f"taken for {message}")
    if kind == "valid" and framing.codec.encode(message) != valid:
        raise Fault(f"{message} is not what was sent")
    report.taken[type(message).__name__] += 1
    if isinstance(message, HandOff | Ping):
        listeners.hear(message)
        report.heard += 1
        if listeners.size() > 4 * RECORDS + 8:
            raise Fault(f"the machines remember {listeners.size()} transfers")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m quiesce.lab.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    wanted = parser.parse_args()
    if wanted.frames < 1:
        parser.error(f"--frames must be at least 1, not {wanted.frames}: nothing would be tried")
    try:
        print(fuzz(wanted.frames, wanted.seed).text())
    except Fault as fault:
        print(f"a fault: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
