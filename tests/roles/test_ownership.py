"""The ownership log on a real ledger: who held a page, when, and what ended it."""

from __future__ import annotations

import json

from quiesce.core.ledger import Change, Ledger
from quiesce.core.messages import Leg, TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import LeaseKey, Proof, ProofKind, Waiver
from quiesce.roles.ownership import MOST_SHOWN, OwnershipLog, runs_of, shown

D, P = 0xD, 0xABC
MORNING = 1_790_000_000.0


class Rig:
    def __init__(self, pages: int = 8, **log: int) -> None:
        self.ledger = Ledger(PagePool(pages), PagePool(4, "rows"))
        self.rids: dict[TransferId, str] = {}
        self.now = MORNING
        self.log = OwnershipLog(self.rids.get, pages=pages, clock=lambda: self.now, **log)
        self.ledger.observe = self.log.observe

    def own(self, seq: int, pages: int) -> TransferId:
        tid = TransferId(D, seq)
        assert self.ledger.own(tid, pages) is not None
        self.rids[tid] = f"request-{seq}"  # a moment later, as in a worker
        return tid

    def lend(self, tid: TransferId, generation: int = 3) -> LeaseKey:
        key = LeaseKey.write(Leg(tid, 0, 0, P))
        self.ledger.lend(key, generation)
        return key

    def about(self, page: int) -> list[dict[str, object]]:
        answer = self.log.about(page)
        json.dumps(answer)  # it goes out as JSON
        return answer["entries"]


def test_log_tells_who_held_a_page_and_which_proof_gave_it_back() -> None:
    rig = Rig()
    first = rig.own(1, 3)
    other = rig.own(2, 2)
    page = rig.ledger.pages(first)[1]
    key = rig.lend(first)
    rig.lend(other)
    rig.ledger.end(first)
    rig.ledger.retain(first)
    del rig.rids[first]  # the worker has forgotten the request; the log has not
    rig.now += 60.25
    rig.ledger.close(key, Proof.spoken(ProofKind.DRAINED, key))
    again = rig.own(3, 6)
    rig.lend(again)

    assert page in rig.ledger.pages(again)
    entries = rig.about(page)
    assert [(e["event"], e["rid"]) for e in entries] == [
        ("owned", "request-1"),
        ("lent", "request-1"),
        ("ended", "request-1"),
        ("retained", "request-1"),
        ("closed", "request-1"),
        ("returned", "request-1"),
        ("owned", "request-3"),
        ("lent", "request-3"),
    ]
    assert entries[0]["transfer"] == str(first) and entries[0]["pages"] == "0-2"
    assert entries[0]["at"] == "2026-09-21T14:13:20.000Z" and entries[4]["at"] == "2026-09-21T14:14:20.250Z"
    lent = entries[1]
    assert (lent["lease"], lent["peer_epoch"], lent["generation"]) == ("write", f"{P:016x}", 3)
    assert (entries[4]["peer_epoch"], entries[4]["proof"]) == (f"{P:016x}", "drained")


def test_log_names_what_was_no_proof() -> None:
    rig = Rig()
    tid = rig.own(1, 2)
    key = rig.lend(tid)
    rig.ledger.end(tid)
    rig.ledger.waive(key, Waiver("--on-hold-expiry=release: client gone"))
    assert rig.about(0)[-2]["proof"] == "none: --on-hold-expiry=release: client gone"


def test_log_tells_of_a_fence_of_some_pages_only_for_those() -> None:
    rig = Rig()
    tid = rig.own(1, 4)
    key = rig.lend(tid)
    fenced, left = rig.ledger.pages(tid)[0], rig.ledger.pages(tid)[3]
    assert not rig.ledger.close(key, Proof.fenced(P, 3, frozenset({fenced, 7})))
    assert [e["event"] for e in rig.about(fenced)] == ["owned", "lent", "closed in part"]
    assert [e["event"] for e in rig.about(left)] == ["owned", "lent"]
    assert rig.about(7) == []


def test_steps_of_our_own_engine_fill_no_log_but_name_the_request() -> None:
    rig = Rig()
    tid = rig.own(1, 1)
    for _ in range(100):
        key = LeaseKey.compute(tid)
        rig.ledger.lend(key)
        rig.ledger.close(key, Proof.spoken(ProofKind.COMPLETED, key))
    assert [(e["event"], e["rid"]) for e in rig.about(rig.ledger.pages(tid)[0])] == [("owned", "request-1")]


def test_log_is_bounded_in_entries_runs_and_names_and_says_what_it_forgot() -> None:
    rig = Rig(entries=10)
    for seq in range(1, 101):
        rig.ledger.end(rig.own(seq, 2))
    answer = rig.log.about(0)
    assert len(rig.log) == 10 and answer["entries_forgotten"] == 290
    assert answer["remembered_since"] == answer["entries"][0]["at"]
    assert all(entry["rid"] is not None for entry in answer["entries"] if entry["event"] != "owned")
    assert len(rig.log._rids) <= 11 and len(rig.log._whole) == 0

    divided = Rig(pages=64, entries=4)
    divided.log.observe(Change("owned", TransferId(D, 1), range(0, 64, 2)))
    divided.log.observe(Change("owned", TransferId(D, 2), range(1, 64, 2)))
    assert len(divided.log) == 1 and divided.about(1) and not divided.about(0)


def test_a_page_that_does_not_exist_is_said_to_be_none() -> None:
    assert Rig(pages=8).log.about(8) == {"page": 8, "error": "there is no such page here, only 0 to 7"}


def test_runs_are_short_to_read() -> None:
    assert runs_of([9, 3, 4, 5, 17, 8]) == ((3, 5), (8, 9), (17, 17))
    assert shown(runs_of([9, 3, 4, 5, 17, 8])) == "3-5,8-9,17"
    assert shown(runs_of(range(0, 200, 2))).endswith(f"... {100 - MOST_SHOWN} runs more")
