"""How `make bench-overlap` comes to its verdicts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.machine import children_of
from bench.overlap import Asked, judged, told

ALONE = Asked(first=10.015, cpu=10.0, engine=10.0)


def test_the_loss_is_of_pairs_and_the_mover_counts():
    """The machine gets slower from round to round, which is no loss; the mover's work is one."""
    null = [Asked(first=speed, cpu=speed, engine=speed) for speed in (10.0, 11.0, 14.0)]
    shm = [Asked(first=one.cpu, cpu=one.cpu * 1.01, engine=one.cpu, mover=one.cpu * 0.02) for one in null]
    found = {"shm": shm, "null": null, "colocated": [ALONE] * 3}
    loss, _ = judged(found)
    assert loss.value == pytest.approx(0.03) and not loss.met
    assert "+3.0 %, +3.0 %, +3.0 %" in told(found)[-1]


def test_a_first_token_is_late_by_what_it_takes_beside_computing():
    slow = Asked(first=11.040, cpu=11.0, engine=11.0, mover=0.01)  # computing took a second more: not the hand-off's
    _, later = judged({"shm": [slow] * 3, "null": [slow] * 3, "colocated": [ALONE] * 3})
    assert later.value == pytest.approx(25.0) and not later.met


def test_the_children_of_a_process_are_found():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in children_of(os.getpid())
