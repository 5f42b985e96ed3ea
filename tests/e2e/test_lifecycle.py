"""Starting, draining, dying: what `quiesce serve` promises about its own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.conftest import QUICK, SIZES, warmed
from e2e.product import START_SECONDS, STOP_SECONDS, Product, alive, descendants, until
from e2e.streams import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROBE = [30, 31, 32, 33]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(tiny: Path, folder: Path, number: signal.Signals) -> None:
    patient = [word for word in QUICK if not word.startswith("--drain-timeout")]  # what is left of it takes seconds
    with Product(tiny, folder, *SIZES, *patient, "--drain-timeout=60") as product:
        warmed(product)
        right = product.ask(PROBE, 300)
        stream = Stream(product, PROBE, 300)
        stream.until_event()
        product.process.send_signal(number)
        stream.to_end()
        assert stream.whole and stream.text == right, "what runs may finish"
        assert product.process.wait(STOP_SECONDS) == 0
        assert product.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_leaves_nothing(tiny: Path, folder: Path, number: signal.Signals) -> None:
    with Product(tiny, folder, *SIZES, *QUICK) as product:
        until(lambda: b"starting" in product.log.read_bytes(), START_SECONDS, "the first words")
        assert product.stop(number) == 0
        assert product.leftovers() == []


def test_drain_cuts_what_takes_too_long_and_a_second_signal_hurries(fresh: Product) -> None:
    streams = [Stream(fresh, [40 + i], 2000) for i in range(4)]
    for stream in streams:
        stream.until_event()
    fresh.process.send_signal(signal.SIGINT)
    until(lambda: b"draining" in fresh.log.read_bytes(), 30, "the drain to begin")
    fresh.process.send_signal(signal.SIGINT)
    for stream in streams:
        stream.to_end()
        assert stream.whole or stream.error is not None, "the client is told why"
    assert fresh.process.wait(STOP_SECONDS) == 0
    assert fresh.leftovers() == []


def test_killed_supervisor_leaves_no_process(tiny: Path, folder: Path) -> None:
    with Product(tiny, folder, *SIZES, *QUICK) as product:
        warmed(product)
        stream = Stream(product, PROBE, 2000)
        stream.until_event()
        below = descendants(product.process.pid)
        assert len(below) == 4, "router, prefill, its mover, decode"
        product.process.kill()
        product.process.wait()
        until(lambda: not any(alive(pid) for pid in below), 30, "its processes to end")
    # Its folder stays behind; the next start removes it.
    assert list(product.runtime.iterdir())
    with Product(tiny, folder, *SIZES, *QUICK) as successor:
        successor.wait()
        assert len(list(successor.runtime.iterdir())) == 1
        assert successor.stop() == 0
        assert successor.leftovers() == []


def test_two_at_once_and_a_port_in_use(serve: Product, tiny: Path, folder: Path) -> None:
    words = [sys.executable, "-m", "quiesce", "serve", str(tiny), f"--port={serve.port}"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS, check=False, cwd=folder)
    assert refused.returncode == 2
    assert str(serve.port) in refused.stderr and "in use" in refused.stderr.lower()
    with Product(tiny, folder, "--colocated", *SIZES, *QUICK) as other:
        warmed(other)
        for prompt in (PROBE, [9] * 300, [11] * 1000):
            assert other.ask(prompt, 40) == serve.ask(prompt, 40), "with and without a hand-off: the same answer"
        assert set(other.ledger()) == {"colocated-0"}
        stream = Stream(other, PROBE, 1900)
        stream.until_event()
        stream.close()
        other.check_idle(other.boot)
        assert other.stop(signal.SIGINT) == 0
        assert other.leftovers() == []
    serve.check_idle(serve.boot)


def test_help_names_every_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "quiesce", "--help"], capture_output=True, text=True, check=True,
        timeout=START_SECONDS, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert all(command in shown.stdout for command in ("serve", "prefill", "decode", "router", "colocated", "model"))
