"""The soak: what its clients judge, and a short one against a cluster that is broken on purpose."""

from __future__ import annotations

import asyncio
import itertools
import random

import httpx2
import pytest

from quiesce.lab.soak import rounds
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


SAID = 'data: {"choices": [{"delta": {"content": "1, 2, 3, 4"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


async def asked(busy: int, monkeypatch: pytest.MonkeyPatch) -> Soak:
    """One round of three requests at a server that turns the first `busy` away."""
    monkeypatch.setattr(rounds, "AGAIN", 0.0)
    monkeypatch.setattr(rounds, "TRIES", 4)
    left = itertools.count()

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(503, text="full") if next(left) < busy else httpx2.Response(200, text=SAID)

    people = tenants(1, random.Random(1))
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://nowhere") as client:
        told = Soak(Target("http://nowhere"), client, "m", people, random.Random(1))
        told.expected = {(0, variant): "1, 2, 3, 4" for variant in range(rounds.VARIANTS)}
        await told.round(3, storm=0.0)
    return told


def test_who_is_turned_away_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.run(asked(5, monkeypatch))
    assert (told.tally.answered, told.tally.excused, told.tally.turned_away) == (3, 5, 0) and not told.findings


def test_a_round_in_which_nobody_is_served_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.run(asked(1000, monkeypatch))
    assert told.tally.turned_away == 3 and "nobody was served" in told.findings.failed[0]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_cluster_that_loses_messages_and_processes_stays_right(capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(None, "smollm2", (), "", 0.7, 0, 80, 12, 3, 5, True, True, True)
    assert soak(asked) == 0, capsys.readouterr().err
