"""Hand-offs with tagged pages and no model: the machines of the workers, over the engine that is on trial.

Given up half way, push and pull: DRAINED has to come back. And two races: a request is cut off while its prefill
worker writes, and its pages go to somebody else, decode itself (`one_pair`) or a transfer of another prefill worker
(`two_donors`). Their unsafe twins give the pages away at once, and the first one's bytes must be seen to land in
them; else the races would show nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from quiesce.core.ledger import Ledger
from quiesce.core.lender import End, Lender, Publish, Revoked
from quiesce.core.machine import Closed, Fired, Revoke, Timer
from quiesce.core.pages import PagePool
from quiesce.ops import doctor_ack
from quiesce.roles.revoking import spoken
from quiesce.transfer.conformance import bench as suite
from quiesce.transfer.conformance.bench import SENTINEL, Bench, Far, Near, require
from quiesce.transfer.interface import Transport

PAGES = 128
FIRST, SECOND = 1, 100  # page i of one donor is all bytes FIRST + i, of the other SECOND + i, mod 251

Make = Callable[[Path, int, Literal["push", "pull"]], Transport]
Check = Callable[[Bench], None]


def all_of(make: Make) -> list[Check]:
    checks: list[Check] = []
    for direction in ("push", "pull"):
        checks.append(partial(_given_up, make, direction))
        checks[-1].__name__ = f"a_hand_off_given_up_is_drained_{direction}"  # type: ignore[attr-defined]
    for race in (_one_pair, _two_donors):
        for safe in (False, True):
            checks.append(partial(race, safe=safe))
            checks[-1].__name__ = f"race{race.__name__}{'' if safe else '_unsafe'}"  # type: ignore[attr-defined]
    return checks


def _given_up(make: Make, direction: Literal["push", "pull"], bench: Bench) -> None:
    told = doctor_ack.abort(lambda epoch: make(bench._run_dir, epoch, direction), direction, suite.PATIENCE)
    require(told.drained, f"closed by {told.closed_by or 'nothing'} after {told.posts} posts: {told.trouble}")


def _one_pair(bench: Bench, safe: bool) -> None:
    def reuse(lender: Near, pages: list[int]) -> Callable[[int], int]:
        lender.wipe()
        return lambda page: SENTINEL

    _race(bench, safe, reuse)


def _two_donors(bench: Bench, safe: bool) -> None:
    def reuse(lender: Near, pages: list[int]) -> Callable[[int], int]:
        post = second.write(peer, pages, pages, lender.grant(second.epoch, pages))
        require(second.outcome(post) == "PLACED", "the second donor's pages do not arrive")
        return lambda page: (SECOND + page) % 251

    second = bench.far()
    second.fill(SECOND)
    peer = -1

    def joins(lender: Near) -> None:
        nonlocal peer
        peer = bench.attach(second, lender)

    _race(bench, safe, reuse, joins)


def _race(
    bench: Bench,
    safe: bool,
    reuse: Callable[[Near, list[int]], Callable[[int], int]],
    joins: Callable[[Near], None] = lambda lender: None,
) -> None:
    lender, first = bench.near(), bench.far()
    bench.claims(lender, "a fence", lambda caps: caps.fence != "none")
    first.fill(FIRST)
    peer = bench.attach(first, lender)
    joins(lender)
    ledger = Ledger(PagePool(PAGES), PagePool(2, "rows"))
    machine = Lender(lender.epoch, ledger)
    tid = machine.reserve({0: first.epoch}, room=1, pairing=b"tagged", tokens=PAGES, pages=PAGES)
    assert tid is not None
    pages = list(ledger.pages(tid))
    region, generation, _ = grant = lender.grant(first.epoch, pages)
    machine.on(Publish(tid, 0, region, generation, 60_000))
    lender.wipe()
    first.storm(peer, pages, grant)
    bench.until(lambda: not lender.holds(pages[-1], SENTINEL), "the first write to land")
    machine.on(End(tid, "the client left"))
    if safe:
        _until_proven(bench, lender, machine, first, tid)
        again = machine.reserve({0: first.epoch}, room=2, pairing=b"tagged", tokens=PAGES, pages=PAGES)
        require(again is not None and {*ledger.pages(again)} == {*pages}, "the pages did not come back")
    else:
        require(ledger.not_idle(), "the ledger has given pages back without a proof")
    belongs = reuse(lender, pages)
    bench.watch_nothing(suite.WATCH_FOR_LATE)
    wrong = [page for page in pages if not lender.holds(page, belongs(page))]
    if safe:
        require(not wrong, f"{len(wrong)} pages of the next owner hold the first one's bytes")
    else:
        require(wrong, "no late write was seen, although nothing was waited for: this shows nothing here")


def _until_proven(bench: Bench, lender: Near, machine: Lender, donor: Far, tid: object) -> None:
    """The donor never answers and never stops: the hold expires, and the fence it starts is the proof."""
    (asked,) = [a for a in machine.on(Fired(Timer.HOLD, tid, 0)) if isinstance(a, Revoke)]  # type: ignore[arg-type]
    proof = bench.until(lambda: lender.transport.fence(asked.epoch, asked.generation, asked.pages), "a proof")
    closed = machine.on(Revoked(spoken(proof)))
    require(any(isinstance(action, Closed) for action in closed), f"the proof closes nothing: {closed}")
    require(not machine.ledger.not_idle(), "something is left on the ledger")
