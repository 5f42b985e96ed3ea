"""The soak: what its clients judge, and a short one against a cluster that is broken on purpose."""

from __future__ import annotations

import random

import httpx2
import pytest

from quiesce.lab.soak.clients import Heard, tenants
from quiesce.lab.soak.rounds import Soak
from quiesce.lab.soak.run import Asked, soak
from quiesce.lab.soak.target import Target


def judged(heard: Heard, *, excused: bool = False) -> Soak:
    people = tenants(3, random.Random(1))
    told = Soak(Target("http://nowhere"), httpx2.AsyncClient(), "m", people, random.Random(1))
    told.expected = {(0, 0): "1, 2, 3, 4"}
    told._judge(people[0], 0, heard, excused)
    return told


def test_markers_differ_and_none_is_part_of_anothers_prompt() -> None:
    people = tenants(40, random.Random(7))
    assert len({person.marker for person in people}) == 40
    assert not any(one.marker in other.prompt(5) for one in people for other in people if one is not other)


def test_the_answer_given_alone_and_its_beginnings_are_right() -> None:
    assert not judged(Heard("1, 2, 3, 4", finished=True)).findings
    assert not judged(Heard("1, 2", left=True)).findings


def test_another_answer_is_wrong_also_when_the_client_left() -> None:
    assert judged(Heard("1, 2, 3, 5", finished=True)).findings.wrong
    assert judged(Heard("1, 3", left=True)).findings.wrong


def test_another_tenants_secret_is_found_wherever_it_stands() -> None:
    people = tenants(3, random.Random(1))
    assert judged(Heard(f"1, 2 {people[2].marker}", left=True)).findings.foreign


def test_an_error_is_excused_only_while_something_was_broken() -> None:
    assert judged(Heard(status=502, error="gone")).findings.failed
    assert not judged(Heard(status=502, error="gone"), excused=True).findings


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_that_loses_messages_and_processes_stays_right(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(None, "smollm2", (), "", 0.7, 0, 80, 12, 3, 5, True, True, True)
    assert soak(asked) == 0, capsys.readouterr().err
