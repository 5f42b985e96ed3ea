"""`quiesce plan`: its arithmetic, its model against numbers known by hand, what it prints and draws."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from quiesce.lab.plan import draw
from quiesce.lab.plan import verdict as verdicts
from quiesce.lab.plan.against_sim import compare
from quiesce.lab.plan.case import Case, Course, Sizes
from quiesce.lab.plan.command import cases_of, run, sizes_of
from quiesce.lab.plan.course import Least, Simulation
from quiesce.lab.plan.figures import Check, figures, mean_over, quantile_over
from quiesce.lab.plan.options import Cluster, Holds, Output, Workload
from quiesce.lab.plan.requests import NEVER, PlanError, Requests, requests_of
from quiesce.lab.plan.sizing import binding, needs, workers

SAMPLE = Path(__file__).parents[2] / "src/quiesce/lab/data/conversation_sample.jsonl"
SMALL = Sizes(1, 1, page_size=10, prefill_pages=100, decode_pages=100, max_running=4, prefill_speed=100.0,
              decode_speed=10.0, chunk_pages=10, page_seconds=0.01, max_retained=0.2)  # fmt: skip

ONE = Case("one")
NOTHING = Output()


def some(*rows: tuple[float, float, float, float]) -> Requests:
    """(arrival, prompt tokens, answer tokens, when the client leaves)."""
    table = np.array(rows, dtype=float)
    ones, zeros = np.ones(len(rows)), np.zeros(len(rows))
    return Requests(table[:, 0], table[:, 1], table[:, 2], table[:, 3], ones, zeros, ones * 0.5)


def course_of(requests: Requests, case: Case = ONE, sizes: Sizes = SMALL) -> Course:
    simulation = Simulation(requests, sizes, case)
    course = simulation.run()
    assert simulation.running == [0] * sizes.decodes and simulation.promised_total == 0 == simulation.waiting
    assert simulation.source_free == [sizes.prefill_pages] * sizes.prefills
    assert simulation.held_total == sum(pages for _, pages, lasts in course.holds if lasts == NEVER)
    assert simulation.prefills.load == [0] * sizes.prefills and simulation.busy == [-1] * sizes.prefills
    assert not any(simulation.offered) and not any(simulation.active)
    return course


# ---------------------------------------------------------------- the model, by hand


def test_one_request_takes_what_its_parts_take() -> None:
    """200 tokens at 100/s; 20 pages of 0.01 s meanwhile, the last 10 after; 0.005 s for OFFER and for DONE."""
    course = course_of(some((0.0, 200, 30, NEVER)))
    assert course.first[0] == pytest.approx(0.005 + 2.0 + 0.1 + 0.005)
    assert course.delay[0] == 0.0 and not course.holds


def test_a_pool_that_is_full_makes_the_next_one_wait_in_order() -> None:
    """Each promises 60 of 100 pages: the second waits for the first, the third, which would fit, for the second."""
    course = course_of(some((0.0, 300, 300, NEVER), (0.1, 300, 300, NEVER), (0.2, 100, 10, NEVER)))
    first_ends = 0.005 + 3.0 + 0.1 + 0.005 + 30.0
    assert course.delay[1] == pytest.approx(first_ends - 0.1)
    assert course.delay[2] == pytest.approx(first_ends - 0.2)


def test_a_client_that_leaves_during_the_hand_off_leaves_a_hold_as_long_as_its_answer_takes() -> None:
    course = course_of(some((0.0, 200, 30, 0.5), (0.0, 100, 30, 90.0)), Case("one", ack=0.25))
    ((began, pages, lasted),) = course.holds
    assert (began, pages) == (0.5, 20), "the second one leaves after its answer"
    assert 0.25 <= lasted <= 0.25 + 4 * 10 * 0.01
    assert max(course.held) == 20 and course.held[-1] == 0


def test_who_waits_and_who_is_being_answered_leaves_no_hold() -> None:
    course = course_of(some((0.0, 300, 300, 10.0), (0.1, 300, 300, 0.2)))
    assert not course.holds and np.isnan(course.delay[1])


def test_without_answers_a_fence_ends_the_hold_and_its_pages_keep_others_waiting() -> None:
    case = Case("silent", dead=(0.0, NEVER), hold_timeout=30.0, fence=0.5)
    requests = some((0.0, 500, 10, 1.0), (2.0, 500, 10, NEVER))
    course = course_of(requests, case)
    assert course.holds == [(1.0, 50, 30.5)]
    assert course.delay[1] == pytest.approx(1.0 + 30.5 - 2.0), "51 pages are promised, 50 of 100 are held"
    at_once = course_of(requests, dataclasses.replace(case, holds=False))
    assert at_once.delay[1] == 0.0 and not at_once.holds


def test_an_outage_ends_and_the_repeated_abort_is_answered() -> None:
    case = Case("outage", ack=0.1, dead=(0.0, 5.0), hold_timeout=30.0)
    ((_, _, lasted),) = course_of(some((0.0, 200, 10, 1.0)), case).holds
    assert 4.0 < lasted < 4.0 + 2.0 + 0.2 + 0.4


def test_lost_aborts_are_repeated_with_back_off() -> None:
    requests = some((0.0, 200, 10, 0.5))
    lucky, unlucky = (dataclasses.replace(requests, luck=np.array([luck])) for luck in (0.9, 0.2))
    case = Case("loss", ack=0.1, loss=0.5)
    (_, _, short), (_, _, long) = course_of(lucky, case).holds[0], course_of(unlucky, case).holds[0]
    assert long - short == pytest.approx(0.05 + 0.1), "two in a row"


def test_a_fence_that_disrupts_ends_the_hand_offs_of_that_prefill_worker() -> None:
    case = Case("mover", dead=(0.0, NEVER), hold_timeout=1.0, fence=0.0, disrupts=True)
    requests = some((0.0, 200, 10, 0.5), (1.2, 200, 10, NEVER), (1.3, 200, 10, 1.35))
    course = course_of(requests, case)
    assert course.cut == 1 and np.isnan(course.first[1])
    assert sorted(course.holds) == [(0.5, 20, 1.0), (1.35, 20, pytest.approx(0.15))], "one fence ends both holds"
    assert course_of(requests, dataclasses.replace(case, disrupts=False)).cut == 0


def test_done_that_is_on_its_way_ends_the_hold_whether_abort_is_answered_or_not() -> None:
    case = Case("late", ack=0.4, dead=(0.0, NEVER))
    course = course_of(some((0.0, 200, 30, 0.2 + 2.1 + 0.05)), case)
    assert course.holds == [(pytest.approx(2.35), 20, pytest.approx(0.15))]


def test_what_is_retained_restarts_the_worker_and_cuts_what_does_not_finish() -> None:
    case = Case("no proof", dead=(0.0, NEVER), hold_timeout=2.0, fence=None)
    requests = some((0.0, 300, 10, 1.0), (1.5, 100, 300, NEVER), (2.0, 100, 10, NEVER))
    course = course_of(requests, case)
    assert course.restarts == 1, "30 of 100 pages are more than 20 %"
    assert course.cut == 1, "30 s of answer do not fit into the 10 s of draining"
    assert [lasted for _, _, lasted in course.holds] == [pytest.approx(2.0 + 10.0)]
    roomy = dataclasses.replace(SMALL, max_retained=0.5)
    kept = course_of(requests, case, roomy)
    assert kept.restarts == 0 and kept.holds == [(1.0, 30, NEVER)] and kept.held[-1] == 30
    assert kept.samples[-1][1] == 30 and figures(kept).check is None


def test_what_is_larger_than_a_pool_is_refused() -> None:
    course = course_of(some((0.0, 900, 200, NEVER), (1.0, 10, 10, NEVER)))
    assert course.refused == 1 and np.isnan(course.delay[0]) and course.first[1] > 0


def test_a_full_source_pool_makes_prefill_wait() -> None:
    sizes = dataclasses.replace(SMALL, prefill_pages=30, page_seconds=1.0)
    course = course_of(some((0.0, 200, 10, NEVER), (0.0, 200, 10, NEVER)), sizes=sizes)
    sent = 0.005 + 1.0 + 20.0  # its first chunk of ten pages is computed at 1 s
    assert course.first[0] == pytest.approx(sent + 0.005)
    assert course.first[1] == pytest.approx(sent + 1.0 + 20.0 + 0.005)


def test_the_least_loaded_worker_is_picked() -> None:
    least = Least(3)
    for worker, change in ((0, 2), (1, 1), (2, 1), (1, -1), (0, -2)):
        least.add(worker, change)
    assert least.pick() == 0 and least.load == [0, 0, 1]
    least.add(0, 1)
    assert least.pick() == 1


# ---------------------------------------------------------------- figures


def test_figures_are_over_time_not_over_changes() -> None:
    course = Course(Case("x"), SMALL, 10.0, times=[0.0, 2.0, 2.5, 9.9], held=[0, 4, 100, 0])
    assert mean_over(course, 0.0, 10.0) == pytest.approx((4 * 0.5 + 100 * 7.4) / 10)
    assert quantile_over(course, 0.5) == 100 and quantile_over(course, 0.1) == 0 and quantile_over(course, 0.24) == 4
    assert Check(2.0, 0.5, 10.0, 8.0, 8.0).ratio == 0.8 and Check(0.0, 0.0, 0.0, 1.0, 0.0).ratio == float("inf")


@pytest.mark.parametrize("seed", [1, 2])
def test_it_holds_what_littles_law_says(seed: int) -> None:
    """`abort rate x hold time x pages per request`, the rate counted, the rest from the options alone."""
    requests = requests_of(Workload(requests=15_000, rate=40, abort_rate=0.4, abort_after=1.0, seed=seed))
    sizes = sizes_of(Cluster(), Holds(), requests)
    silent = Case("silent", dead=(0.0, NEVER), hold_timeout=5.0, fence=0.25)
    found = figures(Simulation(requests, sizes, silent).run()).check
    assert found is not None and 5.1 < found.hold < 5.25, "5.25, but for those whose DONE was on its way"
    assert found.predicted > 1000 and 0.97 < found.ratio < 1.03
    answered = figures(Simulation(requests, sizes, Case("answered", ack=0.5)).run()).check
    assert answered is not None and 0.35 < answered.hold < 0.55 and 0.9 < answered.ratio < 1.15


def test_the_workers_needed_are_those_that_littles_law_wants() -> None:
    requests = requests_of(Workload(requests=2000, rate=10, prompt="fixed:8000", answer="fixed:400", abort_rate=0))
    sizes = Sizes(1, 1, page_size=16, decode_pages=10_500, max_running=64, prefill_speed=20_000, decode_speed=40,
                  page_seconds=0.0002)  # fmt: skip
    found = needs(requests, sizes)
    assert binding(found, "prefill").what == "computing prompts"
    assert binding(found, "prefill").workers == pytest.approx(requests.rate * 8000 / 20_000)
    assert binding(found, "decode").what == "pages"
    stay = 0.4 + 500 * 0.0002 + 10
    assert binding(found, "decode").workers == pytest.approx(requests.rate * 525 * stay / 10_500)
    assert workers(found, "decode", 0.5) == -(-binding(found, "decode").workers // 0.5)


# ---------------------------------------------------------------- workloads


def test_a_trace_gives_order_and_lengths_and_the_rate_can_be_changed() -> None:
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    asked = requests_of(Workload(trace=SAMPLE, abort_rate=0, context_length=1 << 20))
    assert len(asked) == len(lines) and np.all(np.diff(asked.arrival) >= 0) and np.all(asked.leaves == NEVER)
    assert sorted(asked.prompt) == sorted(max(1, line["input_length"]) for line in lines)
    assert asked.seconds == pytest.approx((lines[-1]["timestamp"] - lines[0]["timestamp"]) / 1000, rel=0.05)
    more = requests_of(Workload(trace=SAMPLE, rate=7.0, requests=3 * len(lines) + 5))
    assert len(more) == 3 * len(lines) + 5 and more.rate == pytest.approx(7.0)
    again = requests_of(Workload(trace=SAMPLE, rate=7.0, requests=3 * len(lines) + 5))
    assert again.arrival.tolist() == more.arrival.tolist()


@pytest.mark.parametrize("text", ["fixed:100", "uniform:50,150", "exponential:100", "lognormal:100,0.1"])
def test_distributions_have_the_mean_that_they_name(text: str) -> None:
    asked = requests_of(Workload(requests=20_000, rate=5, prompt=text, answer="fixed:1", abort_rate=0.25))
    assert asked.prompt.mean() == pytest.approx(100, rel=0.03) and asked.rate == pytest.approx(5, rel=0.05)
    assert np.isfinite(asked.leaves).mean() == pytest.approx(0.25, abs=0.02)


def test_requests_are_cut_to_the_context() -> None:
    asked = requests_of(Workload(requests=100, prompt="fixed:5000", answer="fixed:5000", context_length=2000))
    assert asked.prompt.max() == 1999 and asked.answer.max() == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": "normal:3"}, "--prompt 'normal:3' is no distribution"),
        ({"answer": "uniform:9,3"}, "--answer"),
        ({"prompt": "fixed:-1"}, "above 0"),
        ({"prompt": "fixed:nan,"}, "is no distribution"),
        ({"prompt": "fixed:nan"}, "is no distribution"),
        ({"answer": "exponential:inf"}, "is no distribution"),
        ({"rate": 0.0}, "--rate must be above 0"),
        ({"rate": float("nan")}, "--rate must be above 0"),
        ({"abort_rate": 1.5}, "--abort-rate is a share"),
        ({"abort_after": -1.0}, "--abort-after is in seconds"),
        ({"abort_after": float("nan")}, "--abort-after is in seconds"),
        ({"context_length": 1}, "--context-length must hold a prompt and an answer"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"requests": 1}, "at least 2"),
        ({"trace": Path("/nowhere.jsonl")}, "cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        requests_of(dataclasses.replace(Workload(requests=100), **changes))


@pytest.mark.parametrize("line", ["{", "[1]", '{"timestamp": 1, "input_length": "x", "output_length": 2}',
                                  '{"timestamp": -1, "input_length": 1, "output_length": 2}',
                                  '{"timestamp": NaN, "input_length": 1, "output_length": 2}'])  # fmt: skip
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 2}\n' + line + "\n")
    with pytest.raises(PlanError, match="line 2"):
        requests_of(Workload(trace=trace))
    trace.write_text("\n")
    with pytest.raises(PlanError, match="empty"):
        requests_of(Workload(trace=trace))


@pytest.mark.parametrize(
    ("cluster", "holds", "said"),
    [
        ({"prefill": 0}, {}, "--prefill must be at least 1"),
        ({"page_size": 0}, {}, "--page-size must be above 0"),
        ({"target": 1.5}, {}, "--target"),
        ({"target": float("nan")}, {}, "--target must be above 0"),
        ({"transport": float("inf")}, {}, "--transport must be above 0"),
        ({}, {"ack_latency": float("nan")}, "--ack-latency cannot be nan"),
        ({}, {"max_retained": -0.1}, "--max-retained cannot be -0.1"),
        ({}, {"drain_timeout": -1.0}, "--drain-timeout cannot be -1.0"),
        ({}, {"restart": float("inf")}, "--restart cannot be inf"),
        ({}, {"storm": 2.0}, "--storm cannot be 2.0"),
        ({}, {"hold_timeout": -1.0}, "--hold-timeout cannot be -1.0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(cluster: dict[str, Any], holds: dict[str, Any], said: str) -> None:
    requests = requests_of(Workload(requests=100))
    with pytest.raises(PlanError, match=said):
        sizes_of(Cluster(**cluster), Holds(**holds), requests)
        cases_of(Holds(**holds), requests)


# ---------------------------------------------------------------- the command


def plan(workload: Workload, output: Output = NOTHING, **cluster: Any) -> tuple[int, str]:
    said = io.StringIO()
    code = run(workload, Cluster(**cluster), Holds(), output, Console(file=said, width=150))
    return code, said.getvalue()


def test_the_command_answers_and_writes_every_figure(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    code, said = plan(Workload(trace=SAMPLE, rate=20, abort_rate=0.3), Output(json=target))
    assert code == 0 and "computing prompts" in said and "abort rate x hold time x pages per request" in said
    assert "self-check: the plan agrees with both" in said and said.count("of the simulator's") == 2
    found = json.loads(target.read_text())
    names = [case["name"] for case in found["cases"]]
    assert names == ["no storm, no holds", "no storm", "storm, no holds", "storm, answered", "storm, fenced",
                     "storm, no proof"]  # fmt: skip
    by_name = dict(zip(names, found["cases"], strict=True))
    assert by_name["no storm, no holds"]["held_max"] == 0 < by_name["storm, answered"]["held_max"]
    assert by_name["storm, answered"]["held_mean"] < by_name["storm, fenced"]["held_mean"]
    assert 0.8 < by_name["storm, fenced"]["check"]["ratio"] < 1.2
    assert len(by_name["no storm"]["curve"]) > 300


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quiesce.lab.plan.command._simulate", lambda *what: pytest.fail("it was computed"))
    assert plan(Workload(requests=100), Output(json=tmp_path / "none" / "plan.json"))[0] == 2
    assert "no folder" in capsys.readouterr().err


def test_it_draws(tmp_path: Path) -> None:
    pictures = {kind: tmp_path / f"held.{kind}" for kind in ("png", "svg")}
    code, said = plan(Workload(requests=1500, rate=20, abort_rate=0.3), Output(plot=[*pictures.values()]))
    assert code == 0
    drawn = said.replace("\n", "").partition("drawn: ")[2]
    assert all(str(picture) in drawn for picture in pictures.values())
    assert pictures["png"].read_bytes().startswith(b"\x89PNG")
    text = pictures["svg"].read_text()
    assert text.startswith("<?xml") and "Pages held until proof" in text and "storm, fenced" in text


def test_a_missing_matplotlib_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan(Workload(requests=100), Output(plot=[tmp_path / "held.png"]))[0] == 2
    assert capsys.readouterr().err == (
        "quiesce: --plot needs matplotlib, which is not installed: pip install 'quiesce[plot]'\n"
    )
    with pytest.raises(PlanError, match=r"draws \.png or \.svg"):
        draw.check_targets([tmp_path / "held.pdf"])
    with pytest.raises(PlanError, match="no folder"):
        draw.check_targets([tmp_path / "none" / "held.png"])


def test_a_plan_that_disagrees_with_littles_law_or_the_simulator_says_so_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = requests_of(Workload(rate=20, requests=2000, abort_rate=0.5, abort_after=0.1))
    found = figures(Simulation(requests, sizes_of(Cluster(), Holds(), requests), Case("calm", ack=0.5)).run())
    assert found.check is not None and found.check.law == pytest.approx(1, abs=0.02)
    right = compare(1, all_of_them=False)
    monkeypatch.setattr(verdicts, "compare", lambda *_, **__: right)
    assert verdicts.verdict([found], 1, thorough=False).agrees
    twice = dataclasses.replace(found.check, simulated=2 * found.check.simulated)
    told = verdicts.verdict([dataclasses.replace(found, check=twice)], 1, thorough=False)
    assert not told.agrees and "DISAGREES" in told.lines[-1] and "calm" in told.lines[1]
    longer = dataclasses.replace(right[0], plan=[(at, pages, 2 * lasts) for at, pages, lasts in right[0].plan])
    monkeypatch.setattr(verdicts, "compare", lambda *_, **__: [longer])
    told = verdicts.verdict([found], 1, thorough=False)
    assert not told.agrees and "OUTSIDE" in told.lines[-2]
    assert plan(Workload(rate=20, requests=200))[0] == 1


def test_a_thousand_by_a_thousand_workers_are_planned() -> None:
    """A twentieth of the requests here; `docs/plan.md` has the time of the whole."""
    requests = requests_of(Workload(trace=SAMPLE, rate=1200, requests=5000))
    course = Simulation(requests, dataclasses.replace(sizes_of(Cluster(), Holds(), requests), prefills=1000,
                        decodes=1000), Case("calm")).run()  # fmt: skip
    assert course.events > 15_000 and len(course.delay) == 5000


def test_it_agrees_with_the_simulator_that_runs_the_products_classes() -> None:
    """The same small clusters: as many holds, about as long. What the plan leaves out is worth a third at most. A
    cluster has a few dozen holds, so they are counted over two."""
    for pair in zip(compare(1), compare(2), strict=True):
        for found in pair:
            assert found.agrees and 0.65 < found.ratio < 1.55, found.text()
        plan, sim = (sum(map(len, holds)) for holds in zip(*((one.plan, one.sim) for one in pair), strict=True))
        assert sim > 40 and abs(plan - sim) <= 0.2 * sim + 3, [one.text() for one in pair]
