"""Drives the request machines: sends their legs to workers, hears the workers, and hands tokens to the HTTP side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from typing import Any

from quiesce.api.backend import Ask, Verdict
from quiesce.api.errors import ApiError, unavailable
from quiesce.channel import Received
from quiesce.core.messages import (
    Cancel,
    Drawn,
    Ended,
    Exited,
    Inspected,
    PromptLogprobs,
    Register,
    Registered,
    Tokens,
    Wire,
)
from quiesce.router import pairing
from quiesce.router import request as rq
from quiesce.router.attempts import RetryBudget, Rules, finished, leg, may_continue
from quiesce.router.calls import Call, Work
from quiesce.router.links import Links
from quiesce.router.looking import Looking
from quiesce.router.registry import Change, Connect, Lost, Registry, Silent, Worker

log = logging.getLogger(__name__)

_Workers = dict[rq.Side, Worker]

SWEEP_SECONDS = 0.25
CANCEL_SECONDS = 0.5  # first wait for the answer to a cancel; doubles with each try
CLEAR_SECONDS = 5.0  # within which a failed attempt must be known to be over, for another one to follow


class Dispatcher(Looking):
    """The backend of the API. Make it inside the running loop, then `start`."""

    def __init__(self, registry: Registry | None = None, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        super().__init__(registry or Registry(breaker=self.rules.breaker), asyncio.get_running_loop())
        self._patience = 0.0  # until when a drain waits for running requests
        self._turn = 0
        self._budget = RetryBudget()
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

    def open(self, asks: Sequence[Ask]) -> Work:
        work = Work(self.feed)
        has_prompt: dict[str, Worker] = {}  # group -> the prefill worker of its first sample
        for index, ask in enumerate(asks):
            workers = None if self.draining else self._choose(ask, has_prompt.get(ask.group))
            if workers is None:
                self._take_back(work)
                if (refusal := self.refusal()) is not None:
                    raise refusal
                several = f"; this request needs room for {len(asks)}" if len(asks) > 1 else ""
                raise unavailable(f"every worker has as many requests as it takes{several}", "overloaded")
            if ask.group and "prefill" in workers:
                has_prompt.setdefault(ask.group, workers["prefill"])
            work.calls.append(Call(work, index, ask, workers))
            self._enrol(work.calls[-1])
        self._run(work)
        return work

    def begin(self, work: Work) -> None:
        """Runs calls that were made elsewhere, each with its worker."""
        for call in work.calls:
            self._enrol(call)
        self._run(work)

    def _run(self, work: Work) -> None:
        for call in work.calls:
            self._counts["answers_started"] += 1
            self._budget.request()
            call.began = self._loop.time()
            late = call.ask.deadline - self._loop.time() > 0.9 * self.rules.deadline
            call.timers["deadline"] = self._loop.call_at(call.ask.deadline, self._deadline, call, late)
        for call in work.calls:
            if not call.over:  # not ended by the failure of one before it
                self.feed(call, rq.Begin())

    def _choose(self, ask: Ask, beside: Worker | None = None, avoid: Set[int] = frozenset()) -> _Workers | None:
        self._turn += 1
        local = len(ask.token_ids) < self.rules.local_prefill_below
        wish = pairing.Wish(self._turn, beside, local, self.rules.policy)
        pair = pairing.choose(self._usable(avoid), wish)
        if pair is None:
            return None
        return {"decode": pair.decode} if pair.prefill is None else {"decode": pair.decode, "prefill": pair.prefill}

    def _enrol(self, call: Call) -> None:
        self._calls[call.rid] = call
        tokens = len(call.ask.token_ids) + len(call.emitted)
        for worker in call.workers.values():
            worker.begin(call.rid, tokens)

    def _take_back(self, work: Work) -> None:
        """Nothing has been sent for these yet."""
        for call in work.calls:
            del self._calls[call.rid]
            for worker in call.workers.values():
                worker.over(call.rid)

    def remove(self, worker: Worker, reason: str) -> None:
        """Its requests end here now, and this process of it is not heard again."""
        self._apply(self.registry.remove(worker, reason, self._loop.time()))

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
        if call.pending is not None and isinstance(event, rq.GaveUp | rq.Satisfied):
            self._deliver(call, _verdict(event))  # nobody waits for another attempt
            return
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
                sent = self._send_start(call, side)
                self.feed(call, rq.Sent(side) if sent else rq.NotSent(side, call.workers[side].name))
            case rq.SendCancel(side, reason):
                self._send(call.workers[side], Cancel(call.rid, reason[:500]))
            case rq.Arm(side, tries):
                wait = CANCEL_SECONDS * 2**tries
                call.timers[side] = self._loop.call_later(wait, self.feed, call, rq.Fired(side))
            case rq.Blame() | rq.Credit():
                self._judge(call, action)
            case rq.Finish(verdict, again):
                self._finish(call, verdict, again)
            case rq.LegClosed(side, answered):
                call.workers[side].over(call.rid)
                self._counts["cancels_unanswered"] += not answered
                if (timer := call.timers.pop(side, None)) is not None:
                    timer.cancel()
            case rq.Forget():
                del self._calls[call.rid]
                if call.pending is None:
                    self._counts["answers_ended"] += 1
                else:
                    self._again(call)

    def _judge(self, call: Call, action: rq.Blame | rq.Credit) -> None:
        worker = call.workers[action.side]
        if isinstance(action, rq.Credit):
            worker.breaker.succeeded(call.rid)
            return
        call.failed_at.add(worker.epoch)
        if action.sick:
            worker.breaker.failed(call.rid, hash(call.ask.token_ids), self._loop.time())

    def _send_start(self, call: Call, side: rq.Side) -> bool:
        prefill = call.prefill_of(side)
        message = leg(
            call.ask,
            rid=call.rid,
            room=call.room,
            epoch=self.epoch,
            remaining=call.ask.deadline - self._loop.time(),
            emitted=call.emitted,
            prefill=prefill.latest.address if prefill else None,
            local=side == "decode" and call.workers[side].role == "decode" and prefill is None,
        )
        self._counts["requests_begun"] += side == "decode"
        return self._send(call.workers[side], message)

    # ------------------------------------------------------------ attempts

    def _finish(self, call: Call, verdict: Verdict, again: bool) -> None:
        """The attempt has its verdict; the client gets it unless another attempt may follow."""
        lost = again and not call.machine.prompt_missing
        if lost and (whole := finished(call.ask, call.emitted, self.rules.eos)) is not None:
            verdict = whole
        elif again and self._may_try_again(call):
            call.pending = verdict
            call.timers["clear"] = self._loop.call_later(CLEAR_SECONDS, self._unclear, call)
            return
        self._deliver(call, verdict)

    def _may_try_again(self, call: Call) -> bool:
        return (
            not call.lone
            and call.attempts <= self.rules.retries
            and not self.draining
            and may_continue(call.ask, call.emitted, self.rules.failover)
            and not (call.emitted and call.machine.prompt_missing)
            and not pairing.missing(self._usable(call.failed_at))
            and self._budget.take()
        )

    def _again(self, call: Call) -> None:
        """Every leg of the failed attempt is over."""
        call.timers.pop("clear").cancel()
        verdict = call.pending
        assert verdict is not None
        workers = None if self.draining else self._choose(call.ask, avoid=call.failed_at)
        if workers is None:
            self._counts["answers_ended"] += 1
            self._deliver(call, verdict)
            return
        self._counts["failovers" if call.emitted else "retries"] += 1
        said = (call.ask.rid, call.attempts + 1, verdict.error.message if verdict.error else "")
        log.warning("request %s: attempt %d, because %s", *said, extra={"rid": call.ask.rid})
        call.attempt(workers)
        self._enrol(call)
        self.feed(call, rq.Begin())

    def _unclear(self, call: Call) -> None:
        """A leg of the failed attempt may still run: nothing is sent twice."""
        if call.pending is not None:
            self._deliver(call, call.pending)

    def _deliver(self, call: Call, verdict: Verdict) -> None:
        for name in ("deadline", "clear"):
            if (timer := call.timers.pop(name, None)) is not None:
                timer.cancel()
        call.finish(verdict)
        call.work.failed(call, verdict)

    def _deadline(self, call: Call, late: bool) -> None:
        self.feed(call, rq.GaveUp(504, "the request took longer than it may", "deadline_exceeded", late))

    # ------------------------------------------------------------ what the sockets bring

    def from_worker(self, worker: Worker, message: Wire) -> None:
        if worker.probes and getattr(message, "rid", None) in worker.probes:
            if isinstance(message, Ended):
                self._probes.ended(worker, message)
            return
        self._moved = self._loop.time()
        match message:
            case Tokens(rid=rid, token_ids=token_ids, logprobs=logprobs):
                self._feed_leg(worker, rid, rq.LegTokens, token_ids, logprobs)
            case Drawn(rids=rids, token_ids=drawn):
                for rid, token in zip(rids, drawn, strict=False):
                    self._feed_leg(worker, rid, rq.LegTokens, (token,))
            case PromptLogprobs(rid=rid, first=first, logprobs=prompt):
                self._feed_leg(worker, rid, rq.LegPrompt, first, prompt)
            case Ended(rid=rid):
                self._feed_leg(worker, rid, rq.LegEnded, message)
            case Inspected():
                self._inspections.answered(message)
            case _:
                self._counts["stray_messages"] += 1

    def _feed_leg(self, worker: Worker, rid: str, event: Callable[..., rq.Event], *said: Any) -> None:
        if (found := self._leg(worker, rid)) is not None:
            call, side = found
            self.feed(call, event(side, *said))

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
                    return Registered(self.epoch, self._told)
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
                self._probes.sweep(self.registry.workers.values())
            except Exception:  # one fault must not end the watch over all workers
                log.exception("the sweep over the workers failed")

    def _apply(self, changes: list[Change]) -> None:
        if any(isinstance(change, Connect | Lost) for change in changes):  # limits change with processes alone
            self._told = pairing.context_limit(self.registry.workers.values()) or 0
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
                    self._probes.forget(worker)
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


def _verdict(event: rq.GaveUp | rq.Satisfied) -> Verdict:
    if isinstance(event, rq.Satisfied):
        return Verdict("stop")
    return Verdict(error=ApiError(event.status, event.reason, code=event.code))
