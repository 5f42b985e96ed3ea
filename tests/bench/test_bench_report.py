"""The arithmetic and the verdict of the bench; nothing here measures anything."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from bench.cases import CASES, Case
from bench.limits import Limits, ceiling
from bench.pinned import ENOUGH, interleave
from bench.report import Compared, Spread, Window

from bench import report
from quiesce.engine.config import read_config
from tiny_model import make_tiny_llama

TOKENS = [[1, 2, 3, 4]]


def window(wall: float, cpu: float | None = None, tokens: list[list[int]] = TOKENS) -> Window:
    return Window(100, wall, wall if cpu is None else cpu, tokens)


def compared(ours: list[Window], theirs: list[Window]) -> Compared:
    windows = {"quiesce": ours, "transformers": theirs}
    return report.compare("decode 1", "float32", windows, ceiling=200.0, enough=ENOUGH)


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert report.spread([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0, 3)
    assert report.spread([1.0, 2.0]).text(2) == "1.50 (1.00..2.00)"


def test_no_values_are_no_figure() -> None:
    with pytest.raises(ValueError, match="no values"):
        report.spread([])


def test_ratios_pair_windows_that_followed_each_other() -> None:
    # the machine turned twice as slow in the third round; each pair still says 1.25
    one = compared([window(1.0), window(1.0), window(2.0)], [window(1.25), window(1.25), window(2.5)])
    assert one.ratio == Spread(1.25, 1.25, 1.25, 3)
    assert one.quiesce == Spread(100.0, 50.0, 100.0, 3)


def test_the_share_of_the_limit_does_not_fall_with_a_neighbour() -> None:
    alone, beside = compared([window(1.0)], [window(1.0)]), compared([window(4.0, 1.0)], [window(1.0)])
    assert alone.of_ceiling == beside.of_ceiling == 0.5


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert report.agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert report.agreement([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0


def test_answers_of_different_lengths_are_not_the_same_work() -> None:
    with pytest.raises(ValueError, match="zip"):
        report.agreement([[1, 2]], [[1]])


def test_a_goal_is_missed_below_and_met_at_the_limit() -> None:
    equal, slower = compared([window(1.0)], [window(1.0)]), compared([window(1.01)], [window(1.0)])
    assert [goal.met for goal in report.goals([equal, slower], None)] == [True, False]
    assert report.goals([slower], None)[0].text().startswith("MISSED")


def test_start_up_is_judged_by_its_median_and_only_where_measured() -> None:
    assert report.goals([], None) == []
    assert [g.met for g in report.goals([], report.spread([19.9, 19.9, 90.0]))] == [True]
    assert [g.met for g in report.goals([], report.spread([20.1]))] == [False]


def test_cpu_time_decides_only_where_most_windows_shared_the_core() -> None:
    ours, theirs = [window(4.0, 1.0), window(4.0, 1.0)], [window(1.0), window(2.0, 1.5)]
    shared, quiet = compared(ours, theirs), compared([window(1.0), window(1.0)], theirs)
    assert (shared.disturbed, quiet.disturbed) == (3, 1)
    judged_shared, judged_quiet = report.goals([shared, quiet], None)
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


def test_tables_line_up_and_the_json_holds_every_figure() -> None:
    one = compared([window(1.0)], [window(2.0)])
    head, rule, row = report.engines_table([one]).splitlines()
    assert row.index("2.00 (2.00..2.00)") == head.index("ratio") == rule.index("-", head.index("ratio"))
    serving = {"colocated": {"TTFT ms": report.spread([12.34]), "TPOT ms": report.spread([5.0])}}
    assert "12.3 (12.3..12.3)" in report.serving_table(serving)
    goals = report.goals([one], report.spread([3.0]))
    back = json.loads(json.dumps(report.as_json({"engines": [one], "goals": goals, "none": None})))
    assert back["engines"][0] == dataclasses.asdict(one)
    assert [goal["met"] for goal in back["goals"]] == [True, True]
    assert back["none"] is None


class Played:
    """Stands for a process: hands out windows of given core shares and writes down the order of asking."""

    def __init__(self, subject: str, shares: list[float], order: list[str]) -> None:
        self.subject, self.shares, self.order = subject, shares, order

    def ask(self, **request: object) -> dict[str, object]:
        return {}

    def window(self, case: Case) -> Window:
        self.order.append(self.subject)
        return window(1.0, self.shares.pop(0) if self.shares else 1.0)


def test_turns_alternate_and_the_first_window_does_not_count() -> None:
    order: list[str] = []
    taken = interleave([Played("a", [0.1], order), Played("b", [0.1], order)], CASES[0], 3)  # type: ignore[list-item]
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [w.core_share for w in taken["a"] + taken["b"]] == [1.0] * 6


def test_a_disturbed_window_is_taken_again_within_the_allowance() -> None:
    order: list[str] = []
    subject = Played("a", [1.0, 0.5, 0.7, 0.6, 0.4, 0.3], order)
    taken = interleave([subject], CASES[0], 2)  # type: ignore[list-item]
    assert [w.core_share for w in taken["a"]] == [0.7, 0.6]
    more = interleave([Played("a", [1.0] + [0.5] * 20, order)], CASES[0], 4)["a"]  # type: ignore[list-item]
    assert [w.core_share for w in more] == [0.5] * 4  # ends, though it stays noisy


def test_the_ceiling_is_bytes_for_one_request_and_operations_for_a_prompt(tmp_path: Path) -> None:
    config = read_config(make_tiny_llama(tmp_path))
    one, prompt = CASES[0], next(case for case in CASES if not case.steps)
    slow_memory, slow_sums = Limits(1e9, 1e15), Limits(1e15, 1e9)
    assert ceiling(one, config, "float32", slow_memory) * 2 == pytest.approx(
        ceiling(one, config, "float32", Limits(2e9, 1e15))
    )
    assert ceiling(one, config, "bfloat16", slow_memory) == pytest.approx(
        2 * ceiling(one, config, "float32", slow_memory)
    )
    assert ceiling(prompt, config, "float32", slow_sums) * 2 == pytest.approx(
        ceiling(prompt, config, "float32", Limits(1e15, 2e9))
    )
