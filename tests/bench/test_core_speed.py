"""What an operation of the core costs does not depend on what else there is (`make bench-core` measures it)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.core_speed import (
    GROWTH_GOAL,
    PAGES,
    SMALL,
    WORDS,
    Decode,
    Prefill,
    growth_table,
    in_turns,
    main,
)

CORE = str(Path("src", "quiesce", "core"))
ON_DECODE, ON_PREFILL = ("commit", "abort", "fence"), ("done", "drain", "forget")


def instructions(work: Callable[[int], None], pages: int) -> int:
    """Bytecode instructions that one call executes in core/, after one that is not counted."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            if CORE not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    work(pages)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(pages)
    finally:
        sys.settrace(before)
    return count


def test_every_operation_is_measured() -> None:
    assert set(ON_DECODE + ON_PREFILL) == set(WORDS)


@pytest.mark.parametrize("name", ON_DECODE)
def test_no_instruction_more_for_a_larger_pool_or_a_longer_prompt(name: str) -> None:
    small = instructions(getattr(Decode(10**3), name), SMALL)
    assert small > 100
    assert instructions(getattr(Decode(10**5), name), SMALL) == small
    assert instructions(getattr(Decode(10**5), name), PAGES) == small


@pytest.mark.parametrize("name", ON_DECODE + ON_PREFILL)
def test_no_instruction_more_for_more_transfers_in_flight(name: str) -> None:
    def side(count: int) -> Decode | Prefill:
        return Decode(count + SMALL, count) if name in ON_DECODE else Prefill(count)

    few = instructions(getattr(side(10), name), SMALL)
    assert few > 50
    assert instructions(getattr(side(3_000), name), SMALL) == few


def test_what_is_counted_would_show_a_loop() -> None:
    decode = Decode(10**3, 50)
    assert instructions(lambda _: list(decode.ledger.open_leases()) and None, 0) > 100


def test_a_table_of_growth_tells_what_grows() -> None:
    work = {("commit", size): (lambda n=size: sum(range(n)) and None) for size in (10**3, 10**5)}
    text, met = growth_table(in_turns(work, rounds=3, repeats=3), "numbers")
    assert not met and "reserve" in text
    steady = {("commit", 10): [1.0, 1.0], ("commit", 100): [GROWTH_GOAL, GROWTH_GOAL]}
    assert growth_table(steady, "numbers")[1]


def test_the_bench_prints_its_goals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["core_speed", "--quick", "--rounds", "2"])
    assert main() in (0, 1)
    said = capsys.readouterr().out
    assert "no operation grows with the pool" in said and "131,072 tokens (8,192 pages of 16)" in said
