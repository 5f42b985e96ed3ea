"""A million frames through the real decoder, and proof that the fuzzer would notice."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from quiesce.core.borrower import Borrower
from quiesce.core.codec import Codec
from quiesce.lab import fuzz

GROWTH = 16 << 20  # bytes of resident memory after the first tenth: what allocators keep


def check(report: fuzz.Report, frames: int) -> None:
    print(report.text())
    assert report.frames.total() == frames
    assert set(report.frames) == set(fuzz.KINDS) and report.frames["oversized"] >= frames // 300
    assert report.refused.total() + report.taken.total() == frames
    assert report.refused["mutated"] and report.taken.total() > report.frames["valid"], "no mutation was taken"
    assert report.heard > frames // 40
    assert report.grown < GROWTH


def test_frames_of_a_fixed_seed() -> None:
    check(fuzz.fuzz(20_000, 2026), 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("frames", [200_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_many_frames_of_a_fresh_seed(frames: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    with capsys.disabled():
        print(f"\nfuzzing the wire with seed {seed}: python -m quiesce.lab.fuzz --seed {seed}", flush=True)
        check(fuzz.fuzz(frames, seed), frames)


def test_the_same_seed_makes_the_same_frames() -> None:
    one, two, three = (fuzz.fuzz(4_000, seed) for seed in (5, 5, 6))
    assert (one.frames, one.refused, one.taken) == (two.frames, two.refused, two.taken)
    assert one.taken != three.taken


def raises(*what: type[Exception]) -> Any:
    def decode(self: Codec, frame: Any) -> Any:
        try:
            return self._decoder.decode(frame)
        except what:
            self.malformed += 1
            return None

    return decode


def uncounted(self: Codec, frame: Any) -> Any:
    try:
        return self._decoder.decode(frame) if len(frame) <= self.MAX_BYTES else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def lenient(self: Codec, frame: Any) -> Any:
    """Takes a message that more bytes follow, if it is short."""
    for size in range(len(frame), 0 if len(frame) < 99 else len(frame) - 1, -1):
        try:
            return self._decoder.decode(frame[:size])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    self.malformed += 1
    return None


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (raises(msgspec.ValidationError), "DecodeError"),
        (raises(msgspec.MsgspecError, UnicodeDecodeError), "RecursionError"),
        (uncounted, "counted by the channel, 0 by the codec"),
        (lenient, "taken for"),
    ],
)
def test_a_decoder_that_breaks_a_rule_is_found(decode: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codec, "decode", decode)
    with pytest.raises(fuzz.Fault, match=said):
        fuzz.fuzz(4_000, 1)


def test_a_machine_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Borrower, "_unknown", lambda self, message: self.records[message.leg.tid])
    with pytest.raises(fuzz.Fault, match=r"seed 1, frame \d+, \w+: KeyError.*the frame is 9"):
        fuzz.fuzz(4_000, 1)


def test_the_command_says_what_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz", "--frames", "2000", "--seed", "3"])
    assert fuzz.main() == 0
    assert capsys.readouterr().out.startswith("seed 3: 2,000 frames in ")
    monkeypatch.setattr(Codec, "decode", uncounted)
    assert fuzz.main() == 1
    monkeypatch.setattr("sys.argv", ["fuzz", "--frames", "0"])
    with pytest.raises(SystemExit, match="2"):
        fuzz.main()
    assert "at least 1" in capsys.readouterr().err
