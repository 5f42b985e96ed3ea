"""Where a role opens a lease or takes pages, and what it does them for fails: they come back."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from quiesce.core.ledger import Ledger
from quiesce.core.lender import Lender
from quiesce.core.machine import Action, Closed, Lost
from quiesce.core.messages import Sampling, TransferId
from quiesce.core.pages import PagePool
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.legs import OVERDUE
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.sequence import Sequence

D, P = 0xD, 0xB


def ledger() -> Ledger:
    return Ledger(PagePool(8), PagePool(4, "rows"))


def test_h5_a_peer_that_leaves_between_its_turn_and_the_offer_ends_that_request_alone() -> None:
    """Its transport ends on a thread of its own, at any time. It used to end the decode engine."""
    lender, said = Lender(D, ledger()), list[Action]()
    fake: Any = SimpleNamespace(
        null=SimpleNamespace(epoch=1),
        transport=SimpleNamespace(lend=lambda *_: None),
        ledger=lender.ledger,
        lent={},
        tell=lambda event: said.extend(lender.on(event)),
    )
    tid = lender.reserve({0: P}, room=1, pairing=b"", tokens=3, pages=3)
    assert tid is not None
    DecodeWorker.begin(fake, tid, P, 1000)
    assert [type(action) for action in said] == [Lost, Closed] and not fake.lent
    assert lender.ledger.census().free == 8


def test_h2_a_copy_that_fails_keeps_no_lease() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    pages, tid = ledger(), TransferId(D, 1)
    taken = pages.own(tid, 2)
    fake: Any = SimpleNamespace(ledger=pages, engine=SimpleNamespace(kv=SimpleNamespace(copy=fails)))
    assert taken is not None
    sibling = Sequence(tid, "A", 2, [1, 2], Sampling(1), frozenset(), pages=array("i", taken))
    with pytest.raises(RuntimeError, match="no memory"):
        PrefillWorker._copy_prompt(fake, sibling, sibling)
    assert pages.end(tid) and pages.census().free == 8


def test_a_deadline_that_prefill_is_the_first_to_see_is_the_deadline_and_nobodys_fault() -> None:
    """On a busy machine a leg may arrive here a second after the other one arrived there."""
    said: list[tuple[int, str]] = []
    tid = TransferId(D, 1)
    leg = SimpleNamespace(arrived=time.monotonic(), start=SimpleNamespace(deadline_ms=60_000, probe=False))
    fake: Any = SimpleNamespace(
        generation=SimpleNamespace(by_tid={tid: leg}, leave=lambda tid: None),
        transfers_failed=0,
        say_end=lambda leg, outcome, status, reason, fault: said.append((status, fault)),
    )
    for reason in (f"{OVERDUE} 60 s", "the write failed"):
        DecodeWorker._lost(fake, tid, reason)
    assert said == [(504, ""), (502, "peer")]
