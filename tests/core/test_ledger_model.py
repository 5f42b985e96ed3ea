"""The ledger against a model: whatever is done to it, every page is somewhere, once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quiesce.core.ledger import REMOTE_WRITERS, Change, Ledger, LedgerError
from quiesce.core.messages import TransferId
from quiesce.core.pages import PagePool
from quiesce.core.proofs import Borrowing, LeaseKey, Proof, ProofKind, Waiver

PAGES, ROWS = 8, 3
EPOCHS = st.integers(1, 2)
GENERATIONS = st.integers(0, 3)
picks = st.integers(0, 1 << 16)


@dataclass
class Model:
    pages: list[int]
    owned: bool = True
    retained: bool = False
    leases: dict[LeaseKey, tuple[int, set[int] | None]] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.released: list[TransferId] = []
        self.ledger = Ledger(PagePool(PAGES), PagePool(ROWS, "rows"), lambda tid, pages: self.released.append(tid))
        self.told: dict[TransferId, Model] = {}
        self.ledger.observe = self.hear
        self.model: dict[TransferId, Model] = {}
        self.seq = 0
        self.gone = 0

    def hear(self, change: Change) -> None:
        """Builds the holdings again from nothing but what an observer is told."""
        event, tid, pages, lease, by = change
        assert (by is not None) == event.startswith("closed")
        match event:
            case "owned":
                self.told[tid] = Model(list(pages))
            case "grown":
                self.told[tid].pages.extend(pages)
            case "lent":
                assert lease is not None and set(pages) <= set(self.told[tid].pages)
                self.told[tid].leases[lease.key] = (lease.generation, set(pages))
            case "closed in part":
                assert lease is not None and lease.key in self.told[tid].leases
            case "closed":
                assert lease is not None
                del self.told[tid].leases[lease.key]
            case "ended":
                self.told[tid].owned = False
            case "retained":
                self.told[tid].retained = True
            case "returned":
                assert list(pages) == self.told.pop(tid).pages
            case _:
                raise AssertionError(event)

    def some(self, pick: int) -> TransferId:
        return sorted(self.model)[pick % len(self.model)]

    def settle(self, tid: TransferId) -> bool:
        holding = self.model[tid]
        if holding.owned or holding.leases:
            return False
        del self.model[tid]
        self.gone += 1
        return True

    @rule(pages=st.integers(0, 4))
    def own(self, pages: int) -> None:
        tid = TransferId(9, self.seq)
        self.seq += 1
        room = PAGES - sum(len(holding.pages) for holding in self.model.values())
        taken = self.ledger.own(tid, pages)
        assert (taken is not None) == (pages <= room and len(self.model) < ROWS)
        if taken is not None:
            self.model[tid] = Model(list(taken))

    @precondition(lambda self: self.model)
    @rule(pick=picks, pages=st.integers(0, 3))
    def grow(self, pick: int, pages: int) -> None:
        tid = self.some(pick)
        holding = self.model[tid]
        if not holding.owned:
            with pytest.raises(LedgerError):
                self.ledger.grow(tid, pages)
            return
        taken = self.ledger.grow(tid, pages)
        holding.pages.extend(taken or ())

    @precondition(lambda self: self.model)
    @rule(pick=picks, kind=st.sampled_from(Borrowing), epoch=EPOCHS, generation=GENERATIONS, part=st.booleans())
    def lend(self, pick: int, kind: Borrowing, epoch: int, generation: int, part: bool) -> None:
        tid = self.some(pick)
        holding = self.model[tid]
        key = LeaseKey.foreign(tid) if kind is Borrowing.FOREIGN else LeaseKey(tid, kind, 0, epoch)
        pages = tuple(holding.pages[: pick % 3]) if part else None
        mine = set(holding.pages) if pages is None else set(pages)
        clash = kind is not Borrowing.FOREIGN and any(
            (kind in REMOTE_WRITERS) != (other.kind in REMOTE_WRITERS)
            and Borrowing.RANKS not in (kind, other.kind)
            and (pages is None or theirs is None or mine & theirs)
            for other, (_, theirs) in holding.leases.items()
        )
        ended = not holding.owned and kind is not Borrowing.FOREIGN
        if ended or key in holding.leases or clash:
            with pytest.raises(LedgerError):
                self.ledger.lend(key, generation, pages)
            return
        self.ledger.lend(key, generation, pages)
        holding.leases[key] = (generation, None if pages is None else set(pages))

    @precondition(lambda self: any(holding.leases for holding in self.model.values()))
    @rule(pick=picks, which=picks, kind=st.sampled_from(ProofKind), epoch=EPOCHS, generation=GENERATIONS, some=picks)
    def close(self, pick: int, which: int, kind: ProofKind, epoch: int, generation: int, some: int) -> None:
        lent = sorted(tid for tid in self.model if self.model[tid].leases)
        tid = lent[pick % len(lent)]
        holding = self.model[tid]
        key = list(holding.leases)[which % len(holding.leases)]
        granted, pages = holding.leases[key]
        if kind in (ProofKind.FENCED, ProofKind.GONE):
            narrow = frozenset(holding.pages[: some % 4]) if some % 2 else None
            proof = Proof(kind, epoch, generation=generation, pages=narrow)
            fits = key.kind is not Borrowing.FOREIGN and epoch == key.epoch and granted <= generation
            left = set() if narrow is None else (set(holding.pages) if pages is None else pages) - narrow
        else:
            proof = Proof.spoken(kind, LeaseKey(tid, key.kind, key.rank, epoch))
            fits, left = key.kind is not Borrowing.FOREIGN and epoch == key.epoch, set()
        stale = self.ledger.stale
        assert self.ledger.close(key, proof) == (fits and not left)
        assert self.ledger.stale == stale + (not fits)
        if fits and left:
            holding.leases[key] = (granted, left)
        elif fits:
            del holding.leases[key]
            self.settle(tid)

    @precondition(lambda self: self.model)
    @rule(pick=picks)
    def close_foreign(self, pick: int) -> None:
        tid = self.some(pick)
        key = LeaseKey.foreign(tid)
        known = key in self.model[tid].leases
        assert self.ledger.close(key, Proof(ProofKind.FENCED, 0, tid)) == known
        if known:
            del self.model[tid].leases[key]
            self.settle(tid)

    @precondition(lambda self: self.model)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        tid = self.some(pick)
        if not self.model[tid].owned:
            assert not self.ledger.end(tid)
            return
        self.model[tid].owned = False
        assert self.ledger.end(tid) == self.settle(tid)

    @precondition(lambda self: self.model)
    @rule(pick=picks)
    def retain(self, pick: int) -> None:
        tid = self.some(pick)
        self.ledger.retain(tid)
        self.model[tid].retained |= not self.model[tid].owned

    @precondition(lambda self: any(holding.leases for holding in self.model.values()))
    @rule(pick=picks)
    def waive(self, pick: int) -> None:
        lent = sorted(tid for tid in self.model if self.model[tid].leases)
        tid = lent[pick % len(lent)]
        key = next(iter(self.model[tid].leases))
        unsound = self.ledger.unsound
        assert self.ledger.waive(key, Waiver("asked for")) and not self.ledger.waive(key, Waiver("again"))
        assert self.ledger.unsound == unsound + 1
        del self.model[tid].leases[key]
        self.settle(tid)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        census = self.ledger.census()
        assert census.free + census.owned + census.cached + census.held + census.retained == census.total == PAGES
        held = [holding for holding in self.model.values() if not holding.owned]
        assert census.owned == sum(len(holding.pages) for holding in self.model.values() if holding.owned)
        assert census.retained == sum(len(holding.pages) for holding in held if holding.retained)
        assert census.rows_free == ROWS - len(self.model)
        out = [page for holding in self.model.values() for page in holding.pages]
        assert len(out) == len(set(out)) and sorted(self.ledger.pool.out()) == sorted(out)
        assert len(self.released) == len(set(self.released)) == self.gone
        assert len(self.ledger.not_idle()) == len(self.model)

    @invariant()
    def leases_are_those_of_the_model(self) -> None:
        for tid, holding in self.model.items():
            assert set(self.ledger.leases(tid)) == set(holding.leases)
            assert self.ledger.pages(tid) == tuple(holding.pages)

    @invariant()
    def an_observer_knows_who_holds_each_page(self) -> None:
        assert not self.ledger.faults
        assert self.told.keys() == self.model.keys()
        for tid, holding in self.model.items():
            told = self.told[tid]
            assert (told.pages, told.owned, told.retained) == (holding.pages, holding.owned, holding.retained)
            assert told.leases.keys() == holding.leases.keys()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
