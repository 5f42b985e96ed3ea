"""One round of a soak: a burst of tenants of every manner, sometimes while a process is broken; then silence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

from quiesce.lab.soak.clients import Heard, Manner, Tenant, ask
from quiesce.lab.soak.target import Target

KILLS = ("kill prefill", "kill decode", "kill router", "kill mover")
BREAKS = ("none",) * 4 + KILLS + ("stop prefill", "stop decode", "stop mover")
STOPPED = 1.0  # seconds of a stop
AGAIN = 0.5  # seconds before whoever was turned away asks again
TRIES = 600  # of one request, so that an outage does not use up the round
READY_SECONDS = 300.0  # a restart loads the model, on a machine that may do something else too
LATE_REST = 30.0  # seconds beyond the hold timeout and two, before pages that are not back are a finding
BUSY = (429, 503)
VARIANTS = 6  # prompts of a tenant
SHOWN = 120  # characters


@dataclass
class Findings:
    """Everything that must not be. The soak fails when any is there."""

    wrong: list[str] = field(default_factory=list)  # an answer that is not the oracle's
    foreign: list[str] = field(default_factory=list)  # another tenant's secret in an answer
    unrest: list[str] = field(default_factory=list)  # something was left when all clients had gone
    failed: list[str] = field(default_factory=list)  # an error that no fault of ours explains

    def __bool__(self) -> bool:
        return bool(self.wrong or self.foreign or self.unrest or self.failed)


@dataclass
class Tally:
    requests: int = 0
    answered: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    excused: int = 0  # tries that failed while a process was being broken, or were turned away (429, 503)
    turned_away: int = 0  # requests that were never taken
    broken: Counter[str] = field(default_factory=Counter)
    closed_by: Counter[str] = field(default_factory=Counter)  # proofs of leases, of the workers that were looked at
    mid_transfer: int = 0  # hand-offs given up after their offer had left
    unsound: int = 0
    rounds: int = 0
    rests: list[float] = field(default_factory=list)  # seconds of each round until every page was back
    first_token: float = 0.3  # seconds, lately


@dataclass
class Soak:
    target: Target
    client: httpx2.AsyncClient
    model: str
    people: list[Tenant]
    draw: random.Random
    tokens: int = 32
    concurrency: int = 16
    hold: float = 5.0
    oracle: bool = True
    breaks: bool = False
    findings: Findings = field(default_factory=Findings)
    tally: Tally = field(default_factory=Tally)
    expected: dict[tuple[int, int], str] = field(default_factory=dict)
    _last: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def learn(self) -> None:
        """The oracle: each prompt alone, before anything is broken."""
        for tenant in self.people:
            for variant in range(VARIANTS):
                heard = await self._ask(tenant, variant, Manner())
                if not heard.finished:
                    raise RuntimeError(f"the server did not answer a plain request: {heard.status} {heard.error}")
                self.expected[tenant.number, variant] = heard.text
                self._search(tenant, heard)
        self._last = await self.target.look(self.client)

    async def round(self, requests: int, *, storm: float = 0.6) -> None:
        """`storm`: the share of clients that leave early."""
        how = self.draw.choice(BREAKS) if self.breaks else "none"
        heard = self.tally.answered + self.tally.cut.total()
        gate = asyncio.Semaphore(self.concurrency)
        calm = asyncio.Event()
        breaking = asyncio.ensure_future(self._break(how, calm))
        await asyncio.gather(*(self._one(gate, calm, storm) for _ in range(requests)))
        await breaking
        await self._rest(how)
        if heard == self.tally.answered + self.tally.cut.total():
            self.findings.failed.append(f"round {self.tally.rounds} ({how}): nobody was served")
        self.tally.rounds += 1
        self.tally.broken[how] += 1

    # ------------------------------------------------------------ clients

    async def _one(self, gate: asyncio.Semaphore, calm: asyncio.Event, storm: float) -> None:
        tenant, variant = self.draw.choice(self.people), self.draw.randrange(VARIANTS)
        manner = self._manner(storm)
        async with gate:
            for _ in range(TRIES):
                troubled = not calm.is_set()
                heard = await self._ask(tenant, variant, manner)
                taken = self._judge(tenant, variant, heard, excused=troubled or not calm.is_set())
                if taken or not (self.breaks or heard.status in BUSY):
                    return
                await asyncio.sleep(AGAIN)
            self.tally.turned_away += 1

    def _manner(self, storm: float) -> Manner:
        kind = self.draw.random()
        if kind < storm * 0.7:  # before the first token: queued, offered or under way
            return Manner(cut_after=self.tally.first_token * self.draw.uniform(0.05, 1.1))
        if kind < storm:
            return Manner(cut_at=self.draw.randint(1, 8))
        return Manner(pause=0.02) if self.draw.random() < 0.1 else Manner()

    async def _ask(self, tenant: Tenant, variant: int, manner: Manner) -> Heard:
        self.tally.requests += 1
        return await ask(self.client, self.model, tenant.prompt(variant), self.tokens, manner, self.target.key)

    def _judge(self, tenant: Tenant, variant: int, heard: Heard, excused: bool) -> bool:
        """False: it may be asked again."""
        self._search(tenant, heard)
        expected = self.expected[tenant.number, variant]
        right = heard.text == expected if heard.finished else expected.startswith(heard.text)
        if self.oracle and not right:
            self.findings.wrong.append(
                f"tenant {tenant.number}, prompt {variant}: {heard.text[:SHOWN]!r}, alone {expected[:SHOWN]!r}"
            )
        if heard.first is not None:
            self.tally.first_token += 0.1 * (heard.first - self.tally.first_token)
        if heard.finished:
            self.tally.answered += 1
        elif heard.left:
            self.tally.cut["before a token" if heard.first is None else "while reading"] += 1
        elif excused or heard.status in BUSY:
            self.tally.excused += 1
            return False
        else:
            self.findings.failed.append(f"{heard.status}: {heard.error[:SHOWN] or 'the answer broke off'}")
        return True

    def _search(self, tenant: Tenant, heard: Heard) -> None:
        for other in self.people:
            if other is not tenant and other.marker in heard.text:
                self.findings.foreign.append(
                    f"tenant {tenant.number} reads tenant {other.number}'s {other.marker!r}: {heard.text[:SHOWN]!r}"
                )

    # ------------------------------------------------------------ faults

    async def _break(self, how: str, calm: asyncio.Event) -> None:
        if how == "none":
            calm.set()
            return
        await asyncio.sleep(self.draw.uniform(0.0, 1.0))
        action, role = how.split()
        pids = self.target.pids(role)
        if not pids:
            calm.set()
            return
        pid = self.draw.choice(pids)
        os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        await asyncio.sleep(STOPPED)
        if action == "stop":
            with contextlib.suppress(ProcessLookupError):  # a mover that stands still is ended by its engine
                os.kill(pid, signal.SIGCONT)
        await self._until_ready(how, role, len(pids))
        calm.set()

    async def _until_ready(self, how: str, role: str, count: int) -> None:
        """All processes of the role are there again, and the cluster serves. Movers come when they are needed."""
        limit = time.monotonic() + READY_SECONDS
        count = 0 if role == "mover" else count
        while time.monotonic() < limit:
            try:
                if len(self.target.pids(role)) >= count and (await self.client.get("/ready")).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            await asyncio.sleep(0.1)
        self.findings.unrest.append(f"{READY_SECONDS:.0f} s after `{how}` the cluster is not ready")

    # ------------------------------------------------------------ silence

    async def _rest(self, how: str) -> None:
        """All is back: within the hold timeout and two seconds, on a machine that does nothing else. How long it took
        is told; a finding is what is not back long after that."""
        began = time.monotonic()
        unrest = await self.target.unrest(self.client)
        while unrest and time.monotonic() < began + self.hold + 2.0 + LATE_REST:
            await asyncio.sleep(0.1)
            unrest = await self.target.unrest(self.client)
        self.tally.rests.append(round(time.monotonic() - began, 3))
        self.findings.unrest += [f"round {self.tally.rounds} ({how}): {line}" for line in unrest]
        if self.target.ledger and not unrest:
            self._count(await self.target.look(self.client))

    def _count(self, states: dict[str, dict[str, Any]]) -> None:
        for name, state in states.items():
            before = self._last.get(name, {})
            if before.get("epoch") != state["epoch"]:
                before = {}
            for kind, closed in state["closed_by"].items():
                self.tally.closed_by[kind] += closed - before.get("closed_by", {}).get(kind, 0)
            if unsound := state["unsound"] - before.get("unsound", 0):
                self.tally.unsound += unsound
                self.findings.unrest.append(f"{name}: {unsound} leases were closed without a proof")
            ended = state.get("transfers_ended", {})
            self.tally.mid_transfer += ended.get("holding", 0) - before.get("transfers_ended", {}).get("holding", 0)
        self._last = states
