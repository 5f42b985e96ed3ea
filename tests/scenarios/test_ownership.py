"""Who owns a page while somebody still writes it: prompts that are cut, prompts that wait, and canaries."""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiesce.core.messages import Cancel, Sampling
from quiesce.lab.cluster import Cluster, LabRequest
from quiesce.lab.race.history import history
from quiesce.lab.race.journal import Reader
from quiesce.lab.worker import Faults
from scenarios.conftest import CHUNK, PAGE, Oracle, check_idle, until_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PREFILL, DECODE = PAIR = ("prefill-0", "decode-0")
CONTEXT = 160
SOURCES = 192  # tokens of prefill's pool: 1.2 prompts
POOL = 352  # of decode's: two prompts
LONG = 150


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(8, 500) for _ in range(tokens)]


class Stage(Cluster):
    """One prefill, one decode, and a gate that holds prefill's writes."""

    def ask(self, tokens: list[int], answer: int = 6) -> LabRequest:
        return self.start(tokens, Sampling(max_tokens=answer, ignore_eos=True), PAIR)

    @property
    def gate(self) -> Path:
        return self.run_dir / "gate"

    def posted(self) -> int:
        return sum(note.event == "posted" for note in self.notes.since(0.0))


@pytest.fixture(scope="module")
def stage(tiny: Path) -> Iterator[Stage]:
    sizes = {"page_size": PAGE, "chunked_prefill_size": CHUNK, "max_running": 16, "context_length": CONTEXT}
    with tempfile.TemporaryDirectory(prefix="qs-") as folder, Stage(tiny, Path(folder), **sizes) as stage:
        posts, pages = stage.run_dir / "posts", stage.run_dir / "pages"
        stage.notes = Reader(posts, pages)
        stage.spawn("prefill", PREFILL, Faults(gate=str(stage.gate), journal=str(posts)), max_total_tokens=SOURCES)
        stage.spawn("decode", DECODE, Faults(journal=str(pages)), max_total_tokens=POOL)
        stage.wait_for(*PAIR)
        yield stage


def test_scenario_a1_pages_under_an_unfinished_write_are_nobodys(stage: Stage, oracle: Oracle) -> None:
    """A is aborted at decode while its write is held: two more prompts want its pages, one gets others, one waits."""
    began = time.monotonic()
    stage.gate.touch()
    cut = stage.ask(prompt(1))
    stage.until(lambda: stage.posted() > 0, 30, "A's write to be posted")
    stage._send(DECODE, Cancel(cut.rid, "client gone"))
    stage.until(lambda: stage.inspect(DECODE)["pages"]["held"] > 0, 30, "A's pages to be held")
    others = [stage.ask(prompt(seed)) for seed in (2, 3)]
    stage.until(lambda: stage.inspect(DECODE)["waiting"] == 1, 30, "one prompt to wait for A's pages")
    held = stage.inspect(DECODE)["pages"]
    assert held["held"] == -(-LONG // PAGE) and held["free"] < held["held"]
    stage.gate.unlink()
    until_over(stage, [cut, *others], 30)
    assert [request.tokens for request in others] == oracle([prompt(2), prompt(3)], 6)
    notes = stage.notes.since(began)
    writes = history(notes, began, time.monotonic()).writes
    assert writes and not any(write.late for write in writes), "no write lands in a page that is another's"
    ends = [note.detail for note in notes if note.event == "closed" and note.tid == notes[0].tid]
    assert ends == ["drained"]
    for name in PAIR:
        check_idle(stage, name)


def test_scenario_a38_sources_stay_until_their_write_has_ended(stage: Stage, oracle: Oracle) -> None:
    """A is computed and its write is held; B, which would need A's source pages, waits in prefill's queue."""
    stage.gate.touch()
    before = stage.posted()
    first = stage.ask(prompt(4))
    stage.until(lambda: stage.posted() - before >= -(-LONG // CHUNK), 30, "all of A to be posted")
    computed = stage.inspect(PREFILL)["prompt_tokens_computed"]
    second = stage.ask(prompt(5))
    stage.until(lambda: stage.inspect(PREFILL)["queue"] == 1, 30, "B to wait at prefill")
    stage.until_time(0.2)
    assert stage.inspect(PREFILL)["prompt_tokens_computed"] == computed, "B has no pages to be computed into"
    stage.gate.unlink()
    until_over(stage, [first, second], 30)
    assert [first.tokens, second.tokens] == oracle([prompt(4), prompt(5)], 6)
    for name in PAIR:
        check_idle(stage, name)


@pytest.mark.parametrize("requests", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_scenario_a10_each_answer_begins_with_its_own_token(stage: Stage, oracle: Oracle, requests: int) -> None:
    """64 at a time, one in twenty is cut: nothing of one request's first token is seen in another's answer."""
    prompts = [prompt(seed, 20) for seed in range(100, 164)]
    first = oracle(prompts, 2)
    assert len({tokens[0] for tokens in first}) > 30, "tokens that cannot be told apart would show nothing"
    draw = random.Random(10)
    running: deque[tuple[int, LabRequest]] = deque()
    started = 0
    while started < requests or running:
        while started < requests and len(running) < 64:
            running.append((started % 64, stage.ask(prompts[started % 64], 2)))
            if draw.random() < 0.05:
                stage.cancel(running[-1][1])
            started += 1
        stage.until(lambda: any(request.over for _, request in running), 60, "a request to end")
        for number, request in [one for one in running if one[1].over]:
            running.remove((number, request))
            assert request.tokens == first[number][: len(request.tokens)]
            assert request.cancelled or request.outcome == "length", request.ends
    for name in PAIR:
        check_idle(stage, name)


@pytest.mark.parametrize(
    ("canaries", "rounds", "between"), [(6, 3, 30), pytest.param(30, 40, 50, marks=pytest.mark.long)]
)
def test_scenario_a68_canaries_answer_the_same_from_first_to_last(
    stage: Stage, oracle: Oracle, canaries: int, rounds: int, between: int
) -> None:
    """Nothing that builds up from request to request changes an answer; some of those in between are cut."""
    known = [prompt(seed, 10 + 4 * (seed % 30)) for seed in range(200, 200 + canaries)]
    expected = oracle(known, 6)
    draw = random.Random(68)
    for _ in range(rounds):
        crowd = [stage.ask(prompt(draw.randrange(1 << 30), draw.randint(10, LONG)), 4) for _ in range(between)]
        for request in crowd[::7]:
            stage.cancel(request)
        until_over(stage, crowd, 60)
        asked = [stage.ask(one) for one in known]
        until_over(stage, asked, 60)
        assert [request.tokens for request in asked] == expected
    for name in PAIR:
        check_idle(stage, name)
