"""Pull with real processes: decode reads the pages that prefill lends. Answers, aborts, deaths, and what is held."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.core.messages import Cancel, Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.patient import mover_of
from quiesce.lab.worker import Faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE, CHUNK, PROMPT, CONTEXT = 16, 64, 120, 160
HOLD = 6.0
P, D, OTHER = "prefill-0", "decode-0", "decode-1"
Oracle = Callable[..., list[list[int]]]


def prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(8, 500) for _ in range(tokens)]


class Pulling(Cluster):
    """One prefill whose pool holds a single prompt, two decodes; reads of `decode-0` wait while its gate is shut."""

    def __init__(self, model: Path, run_dir: Path, engine: str) -> None:
        self.engine = engine
        sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 8, "context_length": CONTEXT}
        super().__init__(model, run_dir, direction="pull", transfer=engine, hold_timeout=HOLD, **sizes)
        self.gate, self.pause = run_dir / "gate", run_dir / "pause"
        self.begin(P)
        self.begin(D)
        self.begin(OTHER)

    def begin(self, name: str) -> None:
        """The gated reader waits longer than its source before it fences its own reads."""
        faults = {D: Faults(gate=str(self.gate)), P: Faults(pause=str(self.pause))}.get(name)
        hold = 30.0 if name == D else HOLD
        tokens = CONTEXT if name == P else 512
        self.spawn(name.partition("-")[0], name, faults, max_total_tokens=tokens, hold_timeout=hold)

    def again(self, name: str) -> None:
        self.begin(name)
        self.wait_for(name)

    def ask(self, tokens: list[int], decode: str = D, answer: int = 12, **more: object) -> LabRequest:
        return self.start(tokens, Sampling(max_tokens=answer, ignore_eos=True), (P, decode), **more)  # type: ignore[arg-type]

    def reading(self, tokens: list[int], **more: object) -> LabRequest:
        """Its pages are lent and its read is posted, but nothing of it has moved yet."""
        self.gate.touch()
        request = self.ask(tokens, **more)  # type: ignore[arg-type]
        self.until(lambda: self.inspect(D)["posts"] == 1, 30, "the read")
        assert self.inspect(P)["transfers"] == {"offered": 1}
        return request

    def open(self) -> None:
        self.gate.unlink()

    def over(self, *requests: LabRequest, seconds: float = 60.0) -> None:
        self.until(lambda: all(request.over for request in requests), seconds, "the last words")
        assert all(len(ends) == 1 for request in requests for ends in request.ends.values()), "one last word a leg"

    def idle(self, *names: str, seconds: float = 30.0) -> None:
        for name in names or (P, D, OTHER):
            self.until(lambda name=name: not not_idle(self.inspect(name)), seconds, f"{name} to be idle")  # type: ignore[misc]

    def movers(self, name: str) -> list[int]:
        """The process that reads for it, where that is another one."""
        found = mover_of(self.workers[name].process.pid)
        assert (found is None) == (self.engine == "tcp")
        return [] if found is None else [found]


@pytest.fixture(scope="module", params=["shm", "tcp"])
def pulling(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Pulling]:
    with (
        tempfile.TemporaryDirectory(prefix="qs-", dir="/tmp") as folder,
        Pulling(tiny, Path(folder), request.param) as cluster,
    ):
        cluster.wait_for(P, D, OTHER)
        for name in (D, OTHER):
            cluster.until_served(lambda name=name: cluster.ask(prompt(0), name))  # type: ignore[misc]
        yield cluster


@pytest.fixture(autouse=True)
def whole(pulling: Pulling) -> Iterator[None]:
    """Whatever a test did, the next one finds three workers, an open gate and no pages out."""
    yield
    pulling.gate.unlink(missing_ok=True)
    for name in (P, D, OTHER):
        if pulling.workers[name].killed:
            pulling.again(name)
        else:
            pulling.kill(name, signal.SIGCONT)
    pulling.idle()


def test_answers_over_pull_equal_the_single_process_engine(pulling: Pulling, oracle: Oracle) -> None:
    lengths = [1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, PROMPT, CONTEXT - 12]
    prompts = [prompt(seed, lengths[seed % len(lengths)]) for seed in range(30)]
    before = {name: Counter(pulling.inspect(name)["closed_by"]) for name in (P, D, OTHER)}
    checked = checks(pulling)["in_force"]
    requests = [pulling.ask(tokens, (D, OTHER)[seed % 2]) for seed, tokens in enumerate(prompts)]
    pulling.over(*requests, seconds=60)
    for tokens, request, expected in zip(prompts, requests, oracle(prompts), strict=True):
        assert request.outcome == "length", request.ends
        assert request.tokens == expected, f"prompt of {len(tokens)} tokens"
    pulling.idle()
    for name in (P, D, OTHER):
        state = pulling.inspect(name)
        assert set(Counter(state["closed_by"]) - before[name]) == {"completed"} and state["unsound"] == 0
        assert state["leases_opened"] == state["step_leases"] + sum(state["closed_by"].values())
    assert checks(pulling)["in_force"] - checked == sum(request.workers[1] == D for request in requests)


def test_samples_of_one_prompt_are_lent_one_by_one(pulling: Pulling, oracle: Oracle) -> None:
    before = pulling.inspect(P)["prompt_tokens_computed"]
    pulling.pause.touch()  # a tiny prompt is computed before the next request is there
    requests = [pulling.ask(prompt(50, 40), group="a group") for _ in range(2)]
    pulling.until(lambda: pulling.inspect(P)["siblings"] == 1, 30, "one to wait for the other")
    pulling.pause.unlink()
    pulling.over(*requests)
    [expected] = oracle([prompt(50, 40)])
    assert [request.tokens for request in requests] == [expected] * 2
    assert pulling.inspect(P)["prompt_tokens_computed"] - before <= 41, "the second one copied its pages"


def checks(cluster: Cluster, name: str = D) -> dict[str, float]:
    samples = [s for s in cluster.inspect(name)["samples"] if s.name == "quiesce:grant_checks_total"]
    return {dict(sample.labels)["outcome"]: sample.value for sample in samples}


def revoked(cluster: Cluster) -> int:
    """Leases of source pages that ended by a fence of their reader, or by its death."""
    return sum(revoked_by(cluster.inspect(P)))


def revoked_by(state: dict[str, Any]) -> tuple[int, int]:
    return state["closed_by"].get("fenced", 0), state["closed_by"].get("gone", 0)


# ---------------------------------------------------------------- what is held, and until when


def test_h14_source_pages_are_held_while_a_read_that_was_given_up_may_still_take_from_them(
    pulling: Pulling, oracle: Oracle
) -> None:
    given_up = pulling.reading(prompt(1))
    other = pulling.ask(prompt(2), OTHER)
    pulling.cancel(given_up)
    pulling.over(given_up)
    pulling.until(lambda: pulling.inspect(P)["queue"] == 1, 30, "the next prompt to wait")
    pulling.until_time(0.4)
    source, reader = pulling.inspect(P), pulling.inspect(D)
    assert source["pages"]["held"] == 8 and source["transfers"]["holding"] == 1, "still lent, though nobody wants it"
    assert reader["pages"]["held"] == 8 and reader["posts"] == 1, "and so are those that it would land in"
    assert source["queue"] == 1 and not other.tokens, "the next prompt has to wait for them"
    pulling.open()
    pulling.over(other)
    assert other.tokens == oracle([prompt(2)])[0]
    pulling.idle()
    assert pulling.inspect(P)["closed_by"].get("drained", 0) >= 1


def test_n10_a_reader_that_gave_up_goes_on_pinging_and_is_fenced_all_the_same(
    pulling: Pulling, oracle: Oracle
) -> None:
    before = revoked(pulling)
    given_up = pulling.reading(prompt(3))
    movers = pulling.movers(D)
    pulling._send(D, Cancel(given_up.rid, "only decode is told"))
    pulling.until(lambda: bool(given_up.ends.get(P)), 30, "prefill to hear of it, by FAILED")
    assert pulling.inspect(P)["transfers"] == {"holding": 1}
    pulling.until(lambda: pulling.inspect(P)["transfers"] == {}, HOLD + 30.0, "the fence")
    assert revoked(pulling) == before + 1, "no lease was renewed"
    assert pulling.inspect(D)["posts"] == 1 and pulling.inspect(D)["pages"]["held"] == 8, "its own read has not ended"
    other = pulling.ask(prompt(4), OTHER)
    pulling.over(other)
    assert other.tokens == oracle([prompt(4)])[0]
    pulling.open()
    pulling.idle()
    if movers:
        pid = pulling.workers[D].process.pid
        pulling.until(lambda: mover_of(pid) not in (None, *movers), 30, "the fence to be its mover's death")


def test_a_reader_that_is_stopped_beyond_its_lease_reads_nothing_that_came_later(
    pulling: Pulling, oracle: Oracle
) -> None:
    """Late reads fail cleanly. The engine and its mover stand still while the pages are fenced and given away."""
    late = pulling.reading(prompt(5))
    for pid in (pulling.workers[D].process.pid, *pulling.movers(D)):
        os.kill(pid, signal.SIGSTOP)
    pulling.until(lambda: pulling.inspect(P)["transfers"] == {}, 3.0 + HOLD + 30.0, "the lease, then the fence")
    other = pulling.ask(prompt(6), OTHER)
    pulling.over(other)
    assert other.tokens == oracle([prompt(6)])[0], "its pages are in use again"
    pulling.open()
    pulling.kill(D, signal.SIGCONT)
    pulling.over(late)
    assert late.outcome in ("failed", "cancelled") and not late.tokens
    again = pulling.ask(prompt(5))
    pulling.over(again)
    assert again.tokens == oracle([prompt(5)])[0]


# ---------------------------------------------------------------- aborts


def test_an_abort_before_the_read_frees_at_once(pulling: Pulling) -> None:
    first = pulling.reading(prompt(7))
    queued = pulling.ask(prompt(8), OTHER)
    pulling.until(lambda: pulling.inspect(P)["queue"] == 1, 30, "a prompt to wait")
    pulling.cancel(queued)
    pulling.over(queued)
    pulling.idle(OTHER)
    assert pulling.inspect(P)["queue"] == 0
    pulling.open()
    pulling.over(first)
    assert first.outcome == "length"


def test_an_abort_after_the_commit_touches_no_source_page(pulling: Pulling, oracle: Oracle) -> None:
    request = pulling.ask(prompt(9, 40), answer=100)
    pulling.until(lambda: len(request.tokens) >= 3, 30, "tokens")
    pulling.cancel(request)
    pulling.over(request)
    assert request.tokens == oracle([prompt(9, 40)], 100)[0][: len(request.tokens)]
    pulling.until(lambda: pulling.inspect(P)["transfers"] == {}, 30, "decode's DONE")


# ---------------------------------------------------------------- deaths


def test_a_source_that_dies_under_a_read_fails_that_request_and_the_next_one_is_right(
    pulling: Pulling, oracle: Oracle
) -> None:
    request = pulling.reading(prompt(10))
    epoch = pulling.inspect(D)["epoch"]
    pulling.kill(P)
    request.lost[P] = "killed"
    pulling.until(lambda: request.outcome is not None, 30, "decode's word")
    assert request.outcome == "failed" and not request.tokens
    pulling.open()
    pulling.idle(D)
    assert pulling.inspect(D)["epoch"] == epoch
    pulling.again(P)
    again = pulling.ask(prompt(10))
    pulling.over(again)
    assert again.tokens == oracle([prompt(10)])[0]


def test_a_reader_that_dies_gives_everything_back_at_its_source(pulling: Pulling, oracle: Oracle) -> None:
    request = pulling.reading(prompt(11))
    before = pulling.inspect(P)
    pulling.kill(D)
    request.lost[D] = "killed"
    if pulling.engine == "tcp":  # a closed connection is not a dead engine: the router knows of the death
        pulling.give_up(request, "decode is gone")
    pulling.until(lambda: bool(request.ends.get(P)), 30, "prefill's word")
    pulling.idle(P)
    after = pulling.inspect(P)
    assert sum(revoked_by(after)) == sum(revoked_by(before)) + 1, "nobody's word: a fence, or its death"
    if pulling.engine == "shm":
        assert after["sessions"] == before["sessions"] - 1
        pulling.until(lambda: pulling.inspect(P)["tombstones"] == 0, 30, "nothing to be remembered of it")
    pulling.open()
    pulling.again(D)
    again = pulling.ask(prompt(11))
    pulling.over(again)
    assert again.tokens == oracle([prompt(11)])[0]


def test_a_mover_that_dies_under_a_read_costs_that_request_and_nothing_else(pulling: Pulling, oracle: Oracle) -> None:
    if pulling.engine != "shm":
        pytest.skip("no process reads for it")
    request = pulling.reading(prompt(12))
    fenced, gone = revoked_by(pulling.inspect(P))
    [mover] = pulling.movers(D)
    os.kill(mover, signal.SIGKILL)
    pulling.until(lambda: pulling.inspect(P)["transfers"] == {}, 30, "the proof of its death")
    assert revoked_by(pulling.inspect(P)) == (fenced, gone + 1), "long before the fence"
    pulling.open()
    pulling.over(request)
    assert request.outcome in ("failed", "cancelled") and not request.tokens
    again = pulling.ask(prompt(12))
    pulling.over(again)
    assert again.tokens == oracle([prompt(12)])[0]
