"""How `make bench-overlap` comes to its verdicts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.machine import children_of
from bench.overlap import Asked, asked_of, judged, told, used

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


def test_what_a_prompt_took_is_told_apart_by_process_and_thread():
    computes = os.getpid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as mover:
        spent = {
            (computes, "loop"): (0.02, 0.5),
            (computes, "engine"): (10.0, 0.03),
            (mover.pid, "mover"): (0.01, 0.0),
            (1, "router"): (0.1, 0.0),
        }
        asked = asked_of(10.06, spent, computes)
        mover.communicate(b"\n")
    assert (asked.engine, asked.mover, asked.waited) == (10.0, 0.01, 0.03)
    assert asked.cpu == pytest.approx(10.02) and asked.others == pytest.approx(0.1)
    assert asked.beside == pytest.approx(0.06)


def test_the_time_of_this_thread_is_counted():
    key = (os.getpid(), str(threading.get_native_id()))
    before = used([os.getpid()])[key]
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert used([os.getpid()])[key][0] - before[0] > 0.03  # the kernel counts at its ticks


def test_the_children_of_a_process_are_found():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in children_of(os.getpid())
