"""A machine's actions are carried out in order, and one that fails loses none of the others."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from quiesce.roles.worker import Worker


def worker(act: Any) -> Any:
    fake = SimpleNamespace(_todo=deque(), _acting=False, faults=0, act=act)
    fake._guarded = lambda call, *arguments: Worker._guarded(fake, call, *arguments)  # type: ignore[arg-type]
    fake.carry_out = lambda actions: Worker.carry_out(fake, actions)  # type: ignore[arg-type]
    return fake


def test_what_comes_of_an_action_is_done_behind_those_that_were_asked_for_before() -> None:
    done: list[str] = []

    def act(action: str) -> None:
        done.append(action)
        if action == "post":
            fake.carry_out(["outcome"])

    fake = worker(act)
    fake.carry_out(["post", "send", "stopped"])
    assert done == ["post", "send", "stopped", "outcome"]


def test_an_action_that_raises_is_counted_and_the_others_are_done() -> None:
    done: list[str] = []

    def act(action: str) -> None:
        if action == "send":
            raise OSError("no buffer space")
        done.append(action)

    fake = worker(act)
    fake.carry_out(["post", "send", "stopped"])
    assert (done, fake.faults) == (["post", "stopped"], 1)


def test_a_broken_rule_of_the_core_is_not_swallowed() -> None:
    def act(action: str) -> None:
        raise AssertionError("the ledger says no")

    with pytest.raises(AssertionError):
        worker(act).carry_out(["post"])
