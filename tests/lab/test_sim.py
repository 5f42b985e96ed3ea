"""A simulated cluster: the product between modelled sockets, engines and NICs, on a virtual clock."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from typing import Literal

import pytest

from quiesce.cli import main
from quiesce.lab.sim import command
from quiesce.lab.sim.run import SimReport, simulate, simulate_seed
from quiesce.lab.sim.trace import sample
from quiesce.lab.sim.world import Noise, Req, World, world_of
from quiesce.roles.worker import Worker
from quiesce.router.dispatch import Dispatcher


def test_a_quiet_world_answers_every_request_and_is_idle_afterwards() -> None:
    world = dataclasses.replace(world_of(1, 60), noise=Noise(), faults=(), skew=0.0, decode_pages=400)
    calm = tuple(dataclasses.replace(req, abort_at=None, timeout=60.0) for req in world.requests)
    report = simulate(dataclasses.replace(world, requests=calm))
    assert report.broken is None
    assert report.outcomes == {"answered": sum(req.samples for req in calm)}
    assert report.held.most == 0
    assert report.owned.most > 0


@pytest.mark.parametrize("reserve", ["early", "late"])
@pytest.mark.parametrize("direction", ["push", "pull"])
def test_d4_a_burst_larger_than_every_window_waits_its_turn_and_none_of_it_fails(
    reserve: Literal["early", "late"], direction: Literal["push", "pull"]
) -> None:
    """Decode has room for four at a time and prefill computes one page a step: most of them wait many times longer
    than a silent peer may be silent."""
    burst = tuple(Req(number, 0.5, (7, number), 4, answer=6, most=8, timeout=120.0) for number in range(60))
    world = World(
        seed=5,
        requests=burst,
        decode_pages=16,
        prefill_pages=8,
        max_running=4,
        chunk=4,
        hold_timeout=0.5,
        reserve=reserve,
        direction=direction,
    )
    report = simulate(world)
    assert report.broken is None
    assert report.outcomes == {"answered": 60}
    assert max(report.waits) > 3 * world.hold_timeout, "they did wait"
    assert set(report.closed_by) == {"completed"}, "no fence was asked for"


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_d7_a_prefill_worker_that_remembers_no_more_transfers_is_full_and_not_broken(
    direction: Literal["push", "pull"],
) -> None:
    """Who is turned away may come again (503)."""
    burst = tuple(Req(number, 0.5, (7, number), 4, answer=6, most=8, timeout=60.0) for number in range(40))
    report = simulate(World(seed=5, requests=burst, records=2, chunk=4, direction=direction))
    assert report.broken is None
    assert set(report.outcomes) == {"answered", "503"} and report.outcomes["503"] > 0


def test_the_same_seed_is_the_same_run_in_any_process() -> None:
    here = simulate_seed(11, 40)
    code = "from quiesce.lab.sim.run import simulate_seed; r = simulate_seed(11, 40); print(r.events, r.seconds)"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert there.stdout.split() == [str(here.events), str(here.seconds)]


@pytest.mark.parametrize(
    ("seed", "requests"),
    [
        (8054, 200),  # a read in doubt was never drained once its source had died
        (3, 200),  # no fence: what prefill holds of a post in doubt was not reported as retained
        (62, 200),
    ],
)
def test_a_seed_that_once_broke_a_rule_breaks_none(seed: int, requests: int) -> None:
    assert simulate_seed(seed, requests).broken is None


def test_the_names_at_the_edges_are_put_back() -> None:
    from quiesce.roles import decode, prefill, prefill_peers, registration, worker  # noqa: PLC0415
    from quiesce.router import dispatch  # noqa: PLC0415

    modules = (worker, decode, prefill, prefill_peers, registration, dispatch)
    before = [dict(vars(module)) for module in modules]
    simulate_seed(3, 10)
    assert [dict(vars(module)) for module in modules] == before


def test_the_trace_sample_is_there_and_whole() -> None:
    lines = sample()
    assert len(lines) >= 500
    assert all(line.input_length > 0 and line.hash_ids for line in lines)


def test_a_seed_on_the_command_line_reports_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "5", "--requests", "12"]) == 0
    first = capsys.readouterr().out
    assert "requests" in first and "12," in first
    assert main(["sim", "--seed", "5", "--requests", "12"]) == 0
    second = capsys.readouterr().out

    def untimed(said: str) -> list[str]:
        return [line.rstrip() for line in said.splitlines() if "a minute" not in line]  # padded to its width

    assert untimed(first) == untimed(second)


def fails(*what: object, **more: object) -> None:
    raise KeyError("gone")


@pytest.mark.parametrize(("where", "name", "who"), [(Dispatcher, "from_worker", "router"), (Worker, "turn", "P0")])
def test_what_raises_breaks_a_rule_of_its_seed_and_says_where(
    where: type, name: str, who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(where, name, fails)
    broken = simulate_seed(5, 4).broken
    assert broken is not None and (broken.rule, broken.who) == ("no machine raises", who)
    assert "KeyError('gone') in fails" in broken.detail and "test_sim.py:" in broken.detail
    assert main(["sim", "--seed", "5", "--requests", "4"]) == 1
    assert "again: quiesce sim --seed 5 --requests 4" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--seeds", "0"], ["--seeds", "-1"],
                                   ["--seed", "1", "--requests", "0"]])  # fmt: skip
def test_a_simulation_of_nothing_is_refused_and_not_reported_as_clean(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *words]) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_the_search_for_all_mutants_refuses_what_it_would_not_heed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--mutant", "all", "--seed", "3"]) == 2
    assert "leave out --seed" in capsys.readouterr().err


def test_what_many_seeds_came_to_is_counted_and_no_report_is_kept() -> None:
    reports = [simulate_seed(seed, 12) for seed in (5, 6)]
    total = command.Total()
    for report in reports:
        total.add(report)
    assert (total.seeds, total.requests) == (2, 24)
    assert total.events == sum(report.events for report in reports)
    assert total.outcomes == reports[0].outcomes + reports[1].outcomes
    assert total.closed_by == reports[0].closed_by + reports[1].closed_by
    kept = gc.get_referents(*(getattr(total, name) for name in vars(total)))
    assert not any(isinstance(thing, SimReport | World) for thing in kept)


def test_a_mutant_on_the_command_line_is_found_told_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "0", "--seeds", "60", "--requests", "60", "--mutant", "N8 busy"]) == 1
    said = capsys.readouterr().out
    assert "--mutant 'N8 busy'" in said and "whoever hears ABORT answers it" in said
    assert main(["sim", "--mutant", "no such"]) == 2
    assert "N8 busy" in capsys.readouterr().err
