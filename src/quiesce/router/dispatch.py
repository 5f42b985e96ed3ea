"""Drives the request machines: sends their legs to workers, hears the workers, and hands tokens to the HTTP side."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quiesce.api.backend import Ask
from quiesce.api.errors import ApiError, unavailable
from quiesce.channel import Received
from quiesce.core.messages import (
    Cancel,
    Ended,
    Exited,
    Inspect,
    Inspected,
    PromptLogprobs,
    Register,
    Registered,
    Start,
    Tokens,
    Wire,
)
from quiesce.router import pairing
from quiesce.router import request as rq
from quiesce.router.calls import Call, Work
from quiesce.router.health import report
from quiesce.router.links import Links
from quiesce.router.registry import Change, Connect, Lost, Registry, Silent, Worker

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25
CANCEL_SECONDS = 0.5  # first wait for the answer to a cancel; doubles with each try


class Dispatcher:
    """The backend of the API. Make it inside the running loop, then `start`."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = registry or Registry()
        self.epoch = secrets.randbits(64)
        self.draining = False
        self._patience = 0.0  # until when a drain waits for running requests
        self._calls: dict[str, Call] = {}
        self._counts: Counter[str] = Counter()
        self._turn = 0
        self._inspections: dict[int, asyncio.Future[Inspected]] = {}
        self._loop = asyncio.get_running_loop()
        self._links: Links | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def start(self, links: Links) -> None:
        self._links = links
        self._sweeper = self._loop.create_task(self._sweep(), name="sweep")

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for call in self._calls.values():
            for timer in call.timers.values():
                timer.cancel()
        if self._links is not None:
            self._links.close()

    # ------------------------------------------------------------ for the API

    def _usable(self) -> list[Worker]:
        return pairing.usable(self.registry.workers.values(), self._loop.time(), self.registry.patience)

    def context_limit(self) -> int | None:
        return pairing.context_limit(self._usable())

    def refusal(self) -> ApiError | None:
        if self.draining:
            return unavailable("the server is shutting down", "draining", retry_after=5)
        why = pairing.missing(self._usable())
        if why:
            return unavailable(f"no workers can serve this now: {'; '.join(why)}; see /health", "no_workers")
        return None

    def open(self, asks: Sequence[Ask]) -> Work:
        if (refusal := self.refusal()) is not None:
            raise refusal
        work = Work(self.feed)
        has_prompt: dict[str, Worker] = {}  # group -> the prefill worker of its first sample
        for index, ask in enumerate(asks):
            self._turn += 1
            pair = pairing.choose(self._usable(), self._turn, has_prompt.get(ask.group))
            if pair is None:
                self._take_back(work)
                several = f"; this request needs room for {len(asks)}" if len(asks) > 1 else ""
                raise unavailable(f"every worker has as many requests as it takes{several}", "overloaded")
            workers: dict[rq.Side, Worker] = {"decode": pair.decode}
            if pair.prefill is not None:
                workers["prefill"] = pair.prefill
                if ask.group:
                    has_prompt.setdefault(ask.group, pair.prefill)
            work.calls.append(Call(work, index, ask, workers))
            for worker in workers.values():
                worker.legs.add(ask.rid)
        for call in work.calls:
            self._calls[call.ask.rid] = call
            self._counts["answers_started"] += 1
            call.timers["deadline"] = self._loop.call_at(call.ask.deadline, self._deadline, call)
        for call in work.calls:
            if call.machine.verdict is None:  # not ended by the failure of one before it
                self.feed(call, rq.Begin())
        return work

    def _take_back(self, work: Work) -> None:
        """Nothing has been sent for these yet."""
        for call in work.calls:
            for worker in call.workers.values():
                worker.legs.discard(call.ask.rid)

    def health(self) -> tuple[bool, dict[str, Any]]:
        return report(self.registry, self._loop.time(), self.draining, len(self._calls))

    async def inspect(self, timeout: float, page: int | None = None) -> dict[str, Inspected | str]:
        answers: dict[str, Inspected | str] = {}
        asked: dict[str, tuple[int, asyncio.Future[Inspected]]] = {}
        for worker in self.registry.workers.values():
            seq = secrets.randbits(63)
            if worker.up and self._send(worker, Inspect(seq, page)):
                asked[worker.name] = (seq, self._loop.create_future())
                self._inspections[seq] = asked[worker.name][1]
            else:
                answers[worker.name] = "cannot be reached"
        try:
            if asked:
                await asyncio.wait([future for _, future in asked.values()], timeout=timeout)
        finally:
            for seq, _ in asked.values():
                del self._inspections[seq]
        for name, (_, future) in asked.items():
            answers[name] = future.result() if future.done() else f"did not answer within {timeout:g} s"
        return answers

    def counters(self) -> dict[str, int]:
        links = self._links.counters() if self._links else {}
        always = ["answers_started", "answers_ended", "requests_begun"]
        always += ["late_messages", "cancels_unanswered", "stray_messages"]
        return (
            {name: self._counts[name] for name in always}
            | links
            | {
                "registrations_refused": self.registry.refused,
            }
        )

    def legs(self) -> dict[str, int]:
        return {worker.name: len(worker.legs) for worker in self.registry.workers.values()}

    # ------------------------------------------------------------ shutdown

    async def drain(self, seconds: float) -> None:
        """No new work; what runs may end by itself for `seconds`, then it is cancelled and told so."""
        self.draining = True
        self._patience = self._loop.time() + seconds
        while self._calls and self._loop.time() < self._patience:
            await asyncio.sleep(0.02)
        for call in list(self._calls.values()):
            self.feed(call, rq.GaveUp(503, "the server is shutting down", "draining"))
        end = self._loop.time() + 1.0
        while self._calls and self._loop.time() < end:
            await asyncio.sleep(0.02)

    def hurry(self) -> None:
        """Cuts a drain short: what still runs is cancelled and told so now."""
        self._patience = 0.0

    # ------------------------------------------------------------ machines

    def feed(self, call: Call, event: rq.Event) -> None:
        """Runs one event through a request's machine, and carries out what it says."""
        late = call.machine.late
        pending = call.machine.on(event)
        self._counts["late_messages"] += call.machine.late - late
        for action in pending:
            self._do(call, action)

    def _do(self, call: Call, action: rq.Action) -> None:
        match action:
            case rq.Emit(token_ids, logprobs):
                call.emit(token_ids, logprobs)
            case rq.EmitPrompt(logprobs=prompt):
                call.emit_prompt(prompt)
            case rq.SendStart(side):
                worker = call.workers[side]
                sent = self._send(worker, self._start_message(call, side))
                self._counts["requests_begun"] += side == "decode"
                self.feed(call, rq.Sent(side) if sent else rq.NotSent(side, worker.name))
            case rq.SendCancel(side, reason):
                self._send(call.workers[side], Cancel(call.ask.rid, reason[:500]))
            case rq.Arm(side, tries):
                wait = CANCEL_SECONDS * 2**tries
                call.timers[side] = self._loop.call_later(wait, self.feed, call, rq.Fired(side))
            case rq.Finish(verdict):
                call.timers.pop("deadline").cancel()
                call.finish(verdict)
                call.work.failed(call, verdict)
            case rq.LegClosed(side, answered):
                call.workers[side].legs.discard(call.ask.rid)
                self._counts["cancels_unanswered"] += not answered
                if (timer := call.timers.pop(side, None)) is not None:
                    timer.cancel()
            case rq.Forget():
                self._calls.pop(call.ask.rid, None)
                self._counts["answers_ended"] += 1

    def _start_message(self, call: Call, side: rq.Side) -> Start:
        ask = call.ask
        prefill = call.workers.get("prefill") if side == "decode" else None
        return Start(
            rid=ask.rid,
            router_epoch=self.epoch,
            room=call.room,
            token_ids=ask.token_ids,
            sampling=ask.sampling,
            deadline_ms=max(1, int((ask.deadline - self._loop.time()) * 1000)),
            prefill=prefill.latest.address if prefill else None,
            priority=ask.priority,
            group=ask.group,
        )

    def _send(self, worker: Worker, message: Wire) -> bool:
        return self._links is not None and self._links.send(worker, message)

    def _deadline(self, call: Call) -> None:
        self.feed(call, rq.GaveUp(504, "the request took longer than it may", "deadline_exceeded"))

    # ------------------------------------------------------------ what the sockets bring

    def from_worker(self, worker: Worker, message: Wire) -> None:
        match message:
            case Tokens(rid=rid, token_ids=token_ids, logprobs=logprobs):
                if (found := self._leg(worker, rid)) is not None:
                    self.feed(found[0], rq.LegTokens(found[1], token_ids, logprobs))
            case PromptLogprobs(rid=rid, first=first, logprobs=prompt):
                if (found := self._leg(worker, rid)) is not None:
                    self.feed(found[0], rq.LegPrompt(found[1], first, prompt))
            case Ended(rid=rid):
                if (found := self._leg(worker, rid)) is not None:
                    self.feed(found[0], rq.LegEnded(found[1], message))
            case Inspected(seq=seq):
                future = self._inspections.get(seq)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                self._counts["stray_messages"] += 1

    def _leg(self, worker: Worker, rid: str) -> tuple[Call, rq.Side] | None:
        call = self._calls.get(rid)
        if call is None:
            self._counts["late_messages"] += 1
            return None
        for side, owner in call.workers.items():
            if owner is worker:
                return call, side
        self._counts["stray_messages"] += 1  # about a request that this worker has no part in
        return None

    def from_registry(self, received: Received) -> Wire | None:
        now = self._loop.time()
        match received.message:
            case Register() as message:
                self._apply(self.registry.on_register(message, received.user, now))
                if self.registry.knows(message.address.epoch):  # one that was refused must not think it is in
                    return Registered(self.epoch)
            case Exited() as message:
                self._apply(self.registry.on_exited(message, received.user, now))
            case _:
                self._counts["stray_messages"] += 1
        return None

    def link_changed(self, worker: Worker, up: bool) -> None:
        log.info("worker %s: connection %s", worker.name, "up" if up else "down")
        self._apply(self.registry.on_link(worker, up))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self._apply(self.registry.sweep(self._loop.time()))
            except Exception:  # one fault must not end the watch over all workers
                log.exception("the sweep over the workers failed")

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Connect(worker):
                    log.info("worker %s (%s) registered, epoch %016x", worker.name, worker.role, worker.epoch)
                    if self._links is not None:
                        self._links.connect(worker)
                case Silent(worker, reason):
                    log.warning("%s: no new work for it, and its requests wait", reason)
                case Lost(worker, reason, gone):
                    log.warning("%s", reason)
                    if gone and self._links is not None:
                        self._links.disconnect(worker)
                    self._each_leg(worker, lambda side, why=reason, dead=gone: rq.LegLost(side, why, dead))

    def _each_leg(self, worker: Worker, event: Any) -> None:
        for rid in sorted(worker.legs):  # the same order in every process
            call = self._calls.get(rid)
            if call is None:
                continue
            for side, owner in call.workers.items():
                if owner is worker:
                    self.feed(call, event(side))
