"""A request is aborted in each place where decode can have it, and the word that would free its pages never comes."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.core.lending import State
from quiesce.core.messages import Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.lossy import Mischief
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PREFILL, DECODE = PAIR = ("prefill-0", "decode-0")
SIZES = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "context_length": 160, "max_total_tokens": 2048}
PROMPT = list(range(10, 100))
RUNNING = 2  # places in decode's batch


class Stage:
    """A pair of workers whose writes and decode steps can be stopped."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.writes, self.steps = folder / "writes", folder / "steps"

    def ask(self, tokens: int = 40, workers: tuple[str, ...] = PAIR) -> LabRequest:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        prefill = self.cluster.workers[PREFILL].address if workers == (DECODE,) else None
        return self.cluster.start(PROMPT, sampling, workers, prefill=prefill)

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        self.cluster.until(lambda: condition(self.cluster.inspect(DECODE)), 30, what)

    def go_on(self) -> None:
        self.cluster.kill(PREFILL, signal.SIGCONT)
        self.writes.unlink(missing_ok=True)
        self.steps.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def stage(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="qs-") as name:
        folder = Path(name)
        with Cluster(tiny, folder, hold_timeout=10.0, **SIZES) as cluster:
            stage = Stage(cluster, folder)
            cluster.spawn("prefill", PREFILL, Faults(gate=str(stage.writes)), max_running=8)
            cluster.spawn("decode", DECODE, Faults(pause=str(stage.steps)), max_running=RUNNING)
            cluster.wait_for(*PAIR)
            until_over(cluster, [stage.ask(2)], 30)
            yield stage


def waits_for_a_place(stage: Stage) -> list[LabRequest]:
    stage.steps.touch()
    fill = [stage.ask() for _ in range(RUNNING)]
    stage.until(lambda state: state["running"] == RUNNING, "the places to be taken")
    request = stage.ask()
    stage.until(lambda state: state["waiting"] == 1, "one to wait")
    return [request, *fill]


def is_offered(stage: Stage) -> list[LabRequest]:
    stage.cluster.kill(PREFILL, signal.SIGSTOP)  # it would end an offer without a request after two seconds
    request = stage.ask(workers=(DECODE,))
    stage.until(lambda state: state["transfers"] == {"offered": 1}, "the offer")
    return [request]


def is_being_written(stage: Stage) -> list[LabRequest]:
    stage.writes.touch()
    request = stage.ask()
    stage.cluster.until(lambda: stage.cluster.inspect(PREFILL)["posts"] > 0, 30, "a write")
    return [request]


def is_held_already(stage: Stage) -> list[LabRequest]:
    (request,) = is_being_written(stage)
    stage.cluster.cancel(request)
    stage.until(lambda state: state["transfers"] == {"holding": 1}, "its pages to be held")
    return [request]


def waits_for_its_first_step(stage: Stage) -> list[LabRequest]:
    stage.steps.touch()
    request = stage.ask()
    stage.cluster.until(lambda: len(request.tokens) == 1, 30, "the first token, which came with the hand-off")
    return [request]


def is_in_the_middle(stage: Stage) -> list[LabRequest]:
    request = stage.ask(tokens=60)
    stage.cluster.until(lambda: len(request.tokens) >= 3, 30, "three tokens")
    return [request]


PLACES = (
    waits_for_a_place,
    is_offered,
    is_being_written,
    is_held_already,
    waits_for_its_first_step,
    is_in_the_middle,
)
SEEN = {State.OFFERED, State.HOLDING}
PASSED_IN_ONE_EVENT = {State.RESERVED, State.LANDED, State.COMMITTED}  # nobody can abort between
NOT_REACHED = {State.QUARANTINE}  # digests are not negotiated by this version


def test_scenario_b28_no_state_is_without_an_abort() -> None:
    assert set(State) == SEEN | PASSED_IN_ONE_EVENT | NOT_REACHED, "a new state: show how a request leaves it"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_scenario_b28_an_abort_in_each_place_leaves_nothing(
    stage: Stage, oracle: Oracle, place: Callable[[Stage], list[LabRequest]]
) -> None:
    cluster = stage.cluster
    for beside in (0, 1, 0):
        requests = place(stage) + [stage.ask() for _ in range(beside)]
        for request in requests:
            cluster.cancel(request)
            cluster.cancel(request)
        stage.go_on()
        until_over(cluster, requests, 30)
        assert all(len(ends) == 1 for request in requests for ends in request.ends.values()), "one last word a leg"
        check_idle(cluster, DECODE)
    check_idle(cluster, PREFILL)
    probe = stage.ask(8)
    until_over(cluster, [probe], 30)
    assert probe.tokens == oracle([PROMPT], 8)[0]


WORDS = ("Drained", "Busy", "Tainted", "NeverStarted", "Failed")
HOLD, ROUNDS = 6.0, 2


def test_scenario_b25_pages_come_back_by_a_fence_when_prefills_word_never_comes(
    tiny: Path, run_dir: Path, oracle: Oracle
) -> None:
    gate = run_dir / "gate"
    silent = tuple(Mischief(word, "drop", number) for word in WORDS for number in range(1, 200))
    with Cluster(tiny, run_dir, hold_timeout=HOLD, **SIZES) as cluster:
        cluster.spawn("prefill", PREFILL, Faults(gate=str(gate), mischief=silent))
        cluster.spawn("decode", DECODE)
        cluster.wait_for(*PAIR)
        stage = Stage(cluster, run_dir)
        stage.writes = gate
        right = oracle([PROMPT], 8)[0]
        cluster.until_served(lambda: stage.ask(2))
        for _ in range(ROUNDS):
            fenced = releases(cluster)
            (request,) = is_being_written(stage)
            cluster.cancel(request)
            began = time.monotonic()
            stage.until(lambda state: state["pages"]["held"] > 0, "its pages to be held")
            stage.go_on()  # the write ends, and nobody hears of it
            cluster.until_time(HOLD - 0.5 - (time.monotonic() - began))
            held = cluster.inspect(DECODE)["pages"]["held"]
            assert held > 0 or time.monotonic() - began > HOLD, "they came back without a proof"
            for name in PAIR:
                check_idle(cluster, name, seconds=HOLD + 30)
            assert releases(cluster) == fenced + 1
            cluster.until_served(lambda: stage.ask(2))  # the fence was the death of prefill's mover
            again = stage.ask(8)
            until_over(cluster, [again], 30)
            assert again.tokens == right, again.ends


def releases(cluster: Cluster) -> float:
    """Holds that ended by a fence."""
    samples = {s.name + str(dict(s.labels)): s.value for s in cluster.inspect(DECODE)["samples"]}
    return float(samples.get("quiesce:decode_deferred_kv_release_total{'outcome': 'fenced'}", 0))
