"""The arithmetic and the verdict of the bench; nothing here measures anything."""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.cases import CASES, Case, Prompts, chosen
from bench.goals import Goal
from bench.limits import Limits, ceiling
from bench.load import Answer, Timed, figures, timed
from bench.peers import ALL
from bench.pinned import ENOUGH, Turns, interleave
from bench.report import Compared, Spread, Window

from bench import goals, plot, report, serving
from quiesce.engine.config import read_config
from tiny_model import make_tiny_llama

TOKENS = [[1, 2, 3, 4]]
BY_NAME = {case.name: case for case in CASES}


def window(wall: float, cpu: float | None = None, tokens: list[list[int]] = TOKENS) -> Window:
    return Window(100, wall, wall if cpu is None else cpu, tokens)


def compared(ours: list[Window], theirs: list[Window], case: str = "decode-8", peer: str = "vllm") -> Compared:
    windows = {"quiesce": ours, peer: theirs}
    return report.compare(case, "float32", windows, ceiling=200.0, enough=ENOUGH)


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert report.spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0, 3)
    assert report.spread([1.0, 2.0]).text(2) == "1.50 (1.00..2.00)"


def test_no_values_are_no_figure() -> None:
    with pytest.raises(ValueError, match="no values"):
        report.spread([])


def test_ratios_pair_windows_that_followed_each_other() -> None:
    # the machine turned twice as slow in the third round; each pair still says 1.25
    one = compared([window(1.0), window(1.0), window(2.0)], [window(1.25), window(1.25), window(2.5)])
    assert one.against["vllm"].ratio == Spread(1.25, 1.25, 1.25, 3)
    assert one.rates["quiesce"] == Spread(100.0, 50.0, 100.0, 3)


def test_the_share_of_the_limit_does_not_fall_with_a_neighbour() -> None:
    alone, beside = compared([window(1.0)], [window(1.0)]), compared([window(4.0, 1.0)], [window(1.0)])
    assert alone.of_ceiling == beside.of_ceiling == 0.5


def test_a_peer_in_float32_is_judged_as_strictly() -> None:
    windows = {"quiesce": [window(1.0)], "vllm": [window(9.0)], "vllm float32": [window(2.0)]}
    both = report.compare("decode-8", "bfloat16", windows, ceiling=200.0, enough=ENOUGH)
    assert [(goal.value, goal.met) for goal in goals.speed([both])] == [(9.0, True), (2.0, False)]


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert report.agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert report.agreement([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0


def test_answers_of_different_lengths_are_not_the_same_work() -> None:
    with pytest.raises(ValueError, match="zip"):
        report.agreement([[1, 2]], [[1]])


def test_a_verdict_tells_goal_floor_and_miss_apart() -> None:
    texts = [Goal("speed", value, 2.1, 2.6).text() for value in (2.6, 2.1, 2.09)]
    assert [text.split()[0] for text in texts] == ["goal", "floor", "MISSED"]
    assert [Goal("start", value, 10, 10, at_most=True).met for value in (10.0, 10.1)] == [True, False]


def test_speed_is_judged_against_the_peer_that_the_case_names() -> None:
    ours = [window(1.0)]
    (goal,) = goals.speed([compared(ours, [window(2.2)])])
    assert (goal.value, goal.floor, goal.met) == (2.2, 2.1, True)
    assert goals.speed([compared(ours, [window(2.2)], peer="llama.cpp")]) == []
    (slower,) = goals.speed([compared(ours, [window(0.99)], peer="transformers")])
    assert not slower.met


def test_served_goals_are_times_better_than_the_peer() -> None:
    ours = {"tokens/s": 500.0, "TTFT ms": 100.0, "TPOT ms": 50.0}
    theirs = {"tokens/s": 200.0, "TTFT ms": 300.0, "TPOT ms": 100.0}
    serving = {
        way: {goals.AT_ONCE: {name: report.spread([value]) for name, value in found.items()}}
        for way, found in ((goals.OURS, ours), (goals.THEIRS[0], theirs))
    }
    assert [(goal.value, goal.met) for goal in goals.served(serving)] == [(2.5, True), (3.0, True), (2.0, False)]
    assert goals.served({goals.OURS: serving[goals.OURS]}) == []


def test_start_up_is_judged_only_where_measured() -> None:
    assert goals.started(None, {}) == []
    assert [goal.met for goal in goals.started(report.spread([9.9, 9.9, 90.0]), {"decode": 1.3})] == [True, False]


def test_cpu_time_decides_only_where_most_windows_shared_the_core() -> None:
    ours, theirs = [window(4.0, 1.0), window(4.0, 1.0)], [window(1.0), window(2.0, 1.5)]
    shared, quiet = compared(ours, theirs), compared([window(1.0), window(1.0)], theirs)
    assert (shared.disturbed, quiet.disturbed) == (3, 1)
    judged_shared, judged_quiet = goals.speed([shared, quiet])
    assert judged_shared.value == 1.25
    assert "CPU time" in judged_shared.what
    assert judged_quiet.value == 1.5
    assert "CPU time" not in judged_quiet.what


def test_doubts_name_disturbed_windows_and_different_answers() -> None:
    quiet = compared([window(1.0)], [window(1.0)])
    assert report.doubts([quiet]) == []
    other = compared([window(2.0, 1.0)], [window(1.0, tokens=[[1, 9, 9, 9]])])
    disturbed, unlike = report.doubts([other])
    assert "1 of 2 windows had as little as 50%" in disturbed
    assert "only 25%" in unlike


def test_tables_line_up_and_results_survive_their_json() -> None:
    one = compared([window(1.0)], [window(2.0)])
    head, rule, mine, other = report.engines_table([one]).splitlines()
    assert other.index("2.00 (2.00..2.00)") == head.index("Quiesce is") == rule.index("-", head.index("Quiesce is"))
    assert mine.startswith("decode-8")
    names = ("tokens/s", "TTFT ms", "TPOT ms")
    serving = {"colocated": {"8": {name: report.spread([12.34]) for name in names}}}
    assert "12.3 (12.3..12.3)" in report.serving_table(serving)
    back = json.loads(json.dumps(report.as_json({"engines": {"decode-8": one}, "serving": serving})))
    assert report.compared_of(back["engines"]["decode-8"]) == one
    assert report.serving_of(back["serving"]) == serving


def test_the_plot_shows_what_was_measured(tmp_path: Path) -> None:
    one = compared([window(1.0)], [window(2.0)])
    figures_ = {name: report.spread([5.0]) for name in ("tokens/s", "TTFT ms", "TPOT ms")}
    assert plot.draw([one], {"Quiesce PD": {"1": figures_, "8": figures_}}, tmp_path / "made.svg")
    assert "<svg" in (tmp_path / "made.svg").read_text()
    assert not plot.draw([], {}, tmp_path / "none.svg")


def test_cases_go_to_the_peers_that_are_there() -> None:
    assert {rival for case in CASES for rival in case.rivals} <= set(ALL)
    assert [case.name for case in chosen([], ["quiesce", "vllm"])] == [c.name for c in CASES if "quiesce" in c.rivals]
    (only,) = chosen(["decode-8"], ["quiesce", "transformers"])
    assert only.rivals == ("quiesce", "transformers")


def test_prompts_are_as_long_as_asked_and_never_begin_alike(tmp_path: Path) -> None:
    prompts = Prompts(make_tiny_llama(tmp_path))
    decode, requests = BY_NAME["decode-32"], BY_NAME["requests-32"]
    assert prompts.of(decode, 1) == prompts.of(decode, 2)
    made = prompts.of(requests, 1) + prompts.of(requests, 2)
    assert {len(prompt) for prompt in made} == {128}
    assert len({tuple(prompt[:16]) for prompt in made}) == 64
    assert len(prompts.of(BY_NAME["prefill-8000"], 9)[0]) == 8000


class Played:
    """Stands for a process: hands out windows of given core shares and writes down the order of asking."""

    def __init__(self, name: str, shares: list[float], order: list[str]) -> None:
        self.name, self.shares, self.order = name, shares, order

    def window(self, case: Case, prompts: list[list[int]]) -> Window:
        self.order.append(self.name)
        return window(1.0, self.shares.pop(0) if self.shares else 1.0)


def nobody(why: str) -> None:
    raise AssertionError(f"was left out: {why}")


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    return Prompts(make_tiny_llama(tmp_path))


def test_turns_alternate_and_the_first_window_does_not_count(prompts: Prompts) -> None:
    order: list[str] = []
    taken = interleave([Played("a", [0.1], order), Played("b", [0.1], order)], CASES[0], prompts, 3, nobody)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [w.core_share for w in taken["a"] + taken["b"]] == [1.0] * 6


def test_where_an_engine_is_slow_there_are_fewer_rounds(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr("bench.pinned.LONGEST", 5.0)  # a window takes one second
    assert len(interleave([Played("a", [], order)], CASES[0], prompts, 9, nobody)["a"]) == 5
    monkeypatch.setattr("bench.pinned.LONGEST", 0.5)
    assert len(interleave([Played("a", [], order)], CASES[0], prompts, 9, nobody)["a"]) == 3
    assert len(interleave([Played("a", [], order)], CASES[0], prompts, 2, nobody)["a"]) == 2


def test_a_disturbed_window_is_taken_again_within_the_allowance(prompts: Prompts) -> None:
    order: list[str] = []
    subject = Played("a", [1.0, 0.5, 0.7, 0.6, 0.4, 0.3], order)
    taken = interleave([subject], CASES[0], prompts, 2, nobody)
    assert [w.core_share for w in taken["a"]] == [0.7, 0.6]
    more = interleave([Played("a", [1.0] + [0.5] * 20, order)], CASES[0], prompts, 4, nobody)["a"]
    assert [w.core_share for w in more] == [0.5] * 4  # ends, though it stays noisy


def test_an_engine_that_fails_is_left_out_and_the_others_go_on(prompts: Prompts) -> None:
    order: list[str] = []
    broken = Played("b", [], order)
    broken.window = partial(ending, broken.window, order)  # type: ignore[method-assign]
    subjects: list[Turns] = [Played("quiesce", [], order), broken]
    lost: list[str] = []
    taken = interleave(subjects, CASES[0], prompts, 4, lost.append)
    assert {name: len(windows) for name, windows in taken.items()} == {"quiesce": 4}
    assert [one.name for one in subjects] == ["quiesce"]
    assert lost == ["b in decode-1: the process ended"]


def ending(window: Callable[..., Window], order: list[str], *asked: object) -> Window:
    if order.count("b") == 2:
        raise RuntimeError("the process ended")
    return window(*asked)


def test_quiesce_failing_ends_the_run(prompts: Prompts) -> None:
    broken = Played("quiesce", [], order := ["b", "b"])
    broken.window = partial(ending, broken.window, order)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="ended"):
        interleave([broken], CASES[0], prompts, 4, nobody)


class PlayedWay(AbstractContextManager["PlayedWay"]):
    """A server whose answers take no time; from its `fails`-th request on it has none."""

    def __init__(self, name: str, fails: int) -> None:
        self.name, self.left, self.running = name, fails, False

    def __exit__(self, *error: object) -> None: ...

    async def ask(self, prompt: list[int], tokens: int) -> Timed:
        self.left -= 1
        if self.left < 0:
            raise TimeoutError
        return Timed(0.1, 0.9, tokens)

    def pause(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True


def test_a_server_that_fails_is_left_out_and_keeps_what_it_gave(prompts: Prompts) -> None:
    servers = [PlayedWay("Quiesce PD", 99), PlayedWay("vLLM PD", 5)]
    old = {"vLLM PD": {"2": {}}}
    lost: list[str] = []
    serving.measure(
        {one.name: lambda one=one: one for one in servers}, prompts, [2], 3, lambda text: None, lost.append, old
    )
    assert {way: levels["2"]["tokens/s"].n for way, levels in old.items()} == {"Quiesce PD": 3, "vLLM PD": 1}
    assert lost == ["vLLM PD, 2 at once, after 1 bursts: no answer in time"]
    assert not any(one.running for one in servers)


def test_ways_are_chosen_by_name(tmp_path: Path) -> None:
    assert [*serving.ways("m", tmp_path, "float32", [], ["Quiesce PD"])] == ["Quiesce PD"]
    assert [*serving.ways("m", tmp_path, "float32", [], serving.WAYS)] == ["Quiesce colocated", "Quiesce PD"]


def test_the_ceiling_is_bytes_for_one_request_and_operations_for_a_prompt(tmp_path: Path) -> None:
    config = read_config(make_tiny_llama(tmp_path))
    one, prompt, whole = BY_NAME["decode-1"], BY_NAME["prefill-512"], BY_NAME["requests-32"]
    slow_memory, slow_sums = Limits(1e9, 1e15), Limits(1e15, 1e9)
    at = ceiling(one, config, "float32", slow_memory)
    assert at * 2 == pytest.approx(ceiling(one, config, "float32", Limits(2e9, 1e15)))
    assert ceiling(one, config, "bfloat16", slow_memory) == pytest.approx(2 * at)
    assert at < ceiling(one, config, "float32", slow_memory, weight_bytes=1) < 4 * at
    for case in (prompt, whole):
        at = ceiling(case, config, "float32", slow_sums)
        assert at * 2 == pytest.approx(ceiling(case, config, "float32", Limits(1e15, 2e9)))


def test_a_streamed_answer_is_timed_by_its_first_and_last_token() -> None:
    answer = Answer()
    answer.on_body(b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"te')
    answer.on_body(b'xt": "b"}]}\n\ndata: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n')
    one = timed(answer, answer.lines[0][0] - 2.0)
    assert one.tokens == 3
    assert one.first == pytest.approx(2.0)
    assert one.rest == answer.lines[1][0] - answer.lines[0][0]
    with pytest.raises(RuntimeError, match="0 tokens"):
        timed(Answer(), 0.0)


def test_bursts_give_throughput_and_the_medians_within_each() -> None:
    answers = [Timed(0.1, 0.9, 10), Timed(0.3, 1.8, 10), Timed(0.2, 0.9, 10)]
    found = figures([(2.0, answers), (1.0, answers)])
    assert found["tokens/s"] == Spread(22.5, 15.0, 30.0, 2)
    assert found["TTFT ms"].median == pytest.approx(200)
    assert found["TPOT ms"].median == pytest.approx(100)
