"""The crash matrix: every role killed, stopped and restarted while a request is in every state.

Each cell has a request that does not need the victim any more (the bystander, decoding) and one in the state of the
cell. Then: whoever waits is told soon or answered right, every leg has one last word, nobody else restarted, all are
idle, and the next answer is right. `lab/rounds.py` runs it many times; `lab/cells.py` says where engines differ.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quiesce.core.messages import Sampling
from quiesce.lab.cells import Cell, lane_of
from quiesce.lab.cluster import LabRequest, Oracle
from quiesce.lab.idle import not_idle
from quiesce.lab.lossy import Mischief
from quiesce.lab.patient import DECODE, PAIR, PREFILL, PatientRouter, mover_of
from quiesce.lab.process import WorkerProcess
from quiesce.lab.worker import Faults

ROLES = ("prefill", "decode")

HEARD_WITHIN = 5.0  # seconds from a death to the client's error
SLACK = 25.0  # seconds on top where the machine may be anything; `make soak` has none
SHORT = 0.6  # seconds of a short stop
AWAY = 0.5  # seconds without a router
PROMPT = 120  # tokens
POOL = 512  # tokens: the bystander and one more request, if that is short
MS_PER_PAGE = 40.0
BYSTANDER, SUBJECT, QUEUED = 200, 56, 150  # tokens of the answers; the last one does not fit beside the bystander


class CellError(AssertionError):
    """What a cell showed that must not be."""


@dataclass
class Moment:
    """What was under way when the victim was hit."""

    bystander: LabRequest
    subject: LabRequest

    @property
    def requests(self) -> tuple[LabRequest, LabRequest]:
        return self.bystander, self.subject


@dataclass
class Matrix:
    """One cluster that lives through the cells. `spares`: successors that have loaded the model already. `slack`:
    seconds that a machine which others use as well is given on top, wherever something must come in time."""

    cluster: PatientRouter
    oracle: Oracle
    seed: int = 1
    slack: float = 0.0
    spares: dict[str, WorkerProcess] = field(default_factory=dict)
    boot: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lane = lane_of(self.cluster)
        folder = self.cluster.run_dir
        self._gate = folder / "gate"  # keeps back the word that pages are all there
        self._posts, self._steps = folder / "posts", folder / "steps"  # keep back the bytes, and decode's steps
        draw = random.Random(self.seed)
        self._draw = draw
        prompts = [[draw.randrange(8, 500) for _ in range(PROMPT)] for _ in range(8)]
        self._expected = dict(zip(map(tuple, prompts), self.oracle(prompts, BYSTANDER), strict=True))
        for name in PAIR:
            self.cluster.install(name.partition("-")[0], name, self._launch(name, held=False))
        self.cluster.wait_for(*PAIR)
        self._warm()

    def _launch(self, name: str, held: bool) -> WorkerProcess:
        pace = (MS_PER_PAGE, MS_PER_PAGE) if name == self.lane.poster else (0.0, 0.0)
        last = "Done" if self.lane.direction == "push" else "Standing"
        mischief = (Mischief(last, "delay", while_there=str(self._gate)),) if name == PREFILL else ()
        posts = str(self._posts) if name == self.lane.poster else ""
        steps = str(self._steps) if name == DECODE else ""
        faults = Faults(ms_per_page=pace, mischief=mischief, gate=posts, pause=steps)
        tokens = POOL if name == DECODE else 2 * POOL
        return self.cluster.launch(name.partition("-")[0], name, faults, held=held, max_total_tokens=tokens)

    def _warm(self) -> None:
        for name in PAIR:
            if name not in self.spares:
                self.spares[name] = self._launch(name, held=True)
        self._answers()
        self.boot = {name: self.cluster.inspect(name) for name in PAIR}

    # ------------------------------------------------------------ a cell

    def run(self, cell: Cell) -> float:
        """Returns its seconds. Raises CellError, or TimeoutError for what did not come in time."""
        began = time.monotonic()
        before = {name: self.boot[name]["epoch"] for name in PAIR}
        moment = self._reach(cell)
        if cell.victim in ("mover", "router"):  # nothing that is kept back in the engines is in their hands
            self._let_go()
        self.cluster.until_time(self._draw.uniform(0.0, 0.03))
        getattr(self, "_" + cell.action.replace(" ", "_"))(cell, moment)
        self._resume()
        self._judge(cell, moment)
        self._settled()
        replaced = f"{cell.victim}-0" if cell.victim in ROLES and cell.action in ("kill", "restart") else None
        for name in PAIR:
            same = self.cluster.inspect(name)["epoch"] == before[name]
            if same == (name == replaced):
                raise CellError(f"{name} {'is still the old process' if same else 'restarted'}")
        if replaced is not None:
            self._warm()
        else:
            self._answers()
        return time.monotonic() - began

    def _ask(self, tokens: int) -> LabRequest:
        prompt = list(self._draw.choice(list(self._expected)))
        return self.cluster.start(prompt, Sampling(max_tokens=tokens, ignore_eos=True), PAIR)

    def _reach(self, cell: Cell) -> Moment:
        """Two requests, the second of them in the state of the cell, where it stays until it is let go."""
        if cell.state == "queued":
            self._steps.touch()  # the bystander's first token comes with its pages, and it has them for as long
        bystander = self._ask(BYSTANDER)
        self._until(lambda: bool(bystander.tokens), "the bystander's first token", 20)
        if cell.state in ("mid-transfer", "landed"):
            self._posts.touch()
        subject = self._ask(QUEUED if cell.state == "queued" else SUBJECT)
        if cell.state == "queued":
            self._until(lambda: self.cluster.inspect(DECODE)["waiting"] == 1, "a request to wait for pages")
        elif cell.state == "decoding":
            self._until(lambda: len(subject.tokens) >= 3, "three tokens")
        else:
            self._until(lambda: self.cluster.inspect(self.lane.poster)["posts"] > 0, "a transfer under way")
            if cell.state == "landed":
                self._land()
        return Moment(bystander, subject)

    def _land(self) -> None:
        """Every page is there, and the word on which decode commits is on its way or held back."""
        if self.lane.gated:
            self._gate.touch()
        else:
            self._signal(DECODE, signal.SIGSTOP)
        self._let_go()
        if self.lane.direction == "push":
            self._until(lambda: "done" in self.cluster.inspect(PREFILL)["records"], "prefill to be done")
        else:
            self._until(lambda: self.cluster.inspect(DECODE)["checks"], "decode to ask for what stands")

    def _until(self, condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        self.cluster.until(lambda: bool(condition()), seconds + self.slack, what)

    def _signal(self, name: str, number: int) -> None:
        os.kill(self.cluster.workers[name].process.pid, number)

    def _let_go(self) -> None:
        self._posts.unlink(missing_ok=True)
        self._steps.unlink(missing_ok=True)

    def _resume(self) -> None:
        self._let_go()
        self._gate.unlink(missing_ok=True)
        for worker in self.cluster.workers.values():
            worker.process.send_signal(signal.SIGCONT)

    # ------------------------------------------------------------ what is done to the victim

    def _kill(self, cell: Cell, moment: Moment) -> None:
        if cell.victim == "router":
            self._router_leaves(moment, AWAY)
            return
        if cell.victim == "mover":
            os.kill(self._mover(), signal.SIGKILL)
        else:
            self.cluster.kill(f"{cell.victim}-0")
        self._resume()
        self._until(lambda: all(request.told or request.tokens for request in moment.requests), "word", HEARD_WITHIN)
        if cell.victim == "decode":
            self._until(lambda: all(request.told for request in moment.requests), "word", HEARD_WITHIN)
        if cell.victim != "mover":
            survivor = DECODE if cell.victim == "prefill" else PREFILL
            self._until(lambda: all(r.over for r in moment.requests), "the last words", 20)
            self._idle(survivor)
            self._replace(f"{cell.victim}-0")

    def _restart(self, cell: Cell, moment: Moment) -> None:
        """The successor is there before anybody has dealt with the death."""
        if cell.victim == "router":
            self._router_leaves(moment, 0.0)
        elif cell.victim == "mover":  # twice: the one that was started again, too
            first = self._mover()
            os.kill(first, signal.SIGKILL)
            self._resume()
            self._until(lambda: self._mover(0) not in (0, first), "the next mover")
            os.kill(self._mover(), signal.SIGKILL)
        else:
            self.cluster.kill(f"{cell.victim}-0")
            self._replace(f"{cell.victim}-0")

    def _stop_short(self, cell: Cell, moment: Moment) -> None:
        if cell.victim == "router":
            time.sleep(SHORT)  # nobody turns the router, which is this process
            return
        self._stop(cell)
        self.cluster.until_time(SHORT)
        if any(request.errors for request in moment.requests):
            raise CellError(f"a stop of {SHORT} s cost a request: {moment}")
        self._continue(cell)

    def _stop_long(self, cell: Cell, moment: Moment) -> None:
        if cell.victim == "router":
            time.sleep(self.cluster.hold + SHORT)  # likewise
            return
        began = time.monotonic()
        self._stop(cell)
        needy = self._needy(cell, moment)
        within = self.cluster.hold + 2.0
        self._until(lambda: all(request.told for request in needy), "word of the stopped process", within)
        survivors = [name for name in PAIR if not name.startswith(cell.victim) or cell.victim == "mover"]
        if cell.state != "landed" or cell.victim == "decode" or self.lane.gated:
            for name in survivors if self.lane.settles_without(cell.victim) else ():
                self._idle(name, while_stopped=cell.victim)
        self.cluster.until_time(max(0.0, began + self.cluster.hold + SHORT - time.monotonic()))
        self._continue(cell)

    def _needy(self, cell: Cell, moment: Moment) -> list[LabRequest]:
        """Whose answer depends on the victim."""
        if cell.victim == "decode":
            return list(moment.requests)
        if cell.state == "decoding" or (cell.state == "landed" and not self._withheld(cell)):
            return []
        return [moment.subject]

    def _withheld(self, cell: Cell) -> bool:
        """Decode never hears that its pages are right: who would say so does not, or not in time."""
        return self.lane.gated and cell.victim == "prefill"

    def _stop(self, cell: Cell) -> None:
        self._stopped = self._mover() if cell.victim == "mover" else None
        if self._stopped is None:
            self._signal(f"{cell.victim}-0", signal.SIGSTOP)
        else:
            os.kill(self._stopped, signal.SIGSTOP)
        self._let_go()
        if cell.state == "landed" and not self.lane.gated and cell.victim != "decode":
            self._signal(DECODE, signal.SIGCONT)
        if cell.state == "landed" and self.lane.gated and cell.victim != "prefill":
            self._gate.unlink()

    def _continue(self, cell: Cell) -> None:
        if self._stopped is None:
            self._signal(f"{cell.victim}-0", signal.SIGCONT)
            return
        with contextlib.suppress(ProcessLookupError):  # it was ended for not moving
            os.kill(self._stopped, signal.SIGCONT)

    def _mover(self, default: int | None = None) -> int:
        found = mover_of(self.cluster.workers[self.lane.poster].process.pid)
        if found is None and default is None:
            raise CellError(f"{self.lane.poster} has no mover")
        return found or default or 0

    def _replace(self, name: str) -> None:
        self.cluster.install(name.partition("-")[0], name, self.spares.pop(name))
        self.cluster.wait_for(name)

    def _router_leaves(self, moment: Moment, seconds: float) -> None:
        self.cluster.router_dies()
        for request in moment.requests:
            request.errors.append("the router is gone")
            request.lost.update(dict.fromkeys(PAIR, "the router is gone"))
        time.sleep(seconds)  # for so long there is no router
        self._resume()
        self.cluster.router_returns()
        self.cluster.wait_for(*PAIR)

    # ------------------------------------------------------------ what must be true

    def _judge(self, cell: Cell, moment: Moment) -> None:
        self._until(lambda: all(request.over for request in moment.requests), "the last words", 30)
        for request in moment.requests:
            expected = self._expected[request.prompt]
            who = "the bystander" if request is moment.bystander else "the subject"
            if any(len(ends) != 1 for ends in request.ends.values()):
                raise CellError(f"{who} has several last words: {request.ends}")
            if request.tokens != expected[: len(request.tokens)]:
                raise CellError(f"{who}'s answer is wrong")
            if request.outcome == "length" and request.ends[DECODE][0].completion_tokens != len(request.tokens):
                raise CellError(f"{who} ended short")
            if request.told and request.outcome != "length" and not any(_reasons(request)):
                raise CellError(f"{who} failed without a reason: {request.ends}")
            if self._must_succeed(cell, request is moment.bystander) and request.outcome != "length":
                raise CellError(f"{who} was not answered: {request.ends}, {request.errors}, {request.lost}")

    def _must_succeed(self, cell: Cell, bystander: bool) -> bool:
        if cell.action == "stop short" or (cell.victim == "router" and cell.action == "stop long"):
            return True
        if cell.victim in ("decode", "router"):
            return False
        if bystander or cell.state == "decoding":
            return True
        if cell.action == "stop long":
            return cell.state == "landed" and not self._withheld(cell)
        return cell.state == "queued" and cell.victim == "mover"  # a DONE on its way may go down with its speaker

    def _settled(self) -> None:
        for name in PAIR:
            self._idle(name)

    def _idle(self, name: str, while_stopped: str = "") -> None:
        """Within hold timeout + 2 s, and the slack. A borrower remembers what a lender that cannot speak now has not
        closed."""
        lines: list[str] = ["it did not answer"]

        def idle() -> bool:
            state = self.cluster.inspect(name)
            boot = self.boot[name]
            same = self.lane.allowed(boot) if state["epoch"] == boot["epoch"] and not while_stopped else None
            lines[:] = not_idle(state, same)
            if while_stopped == "decode":
                lines[:] = [line for line in lines if not line.startswith("records:")]
            return not lines

        try:
            self.cluster.until(idle, self.cluster.hold + 2.0 + self.slack, f"{name} to be idle")
        except TimeoutError:
            raise CellError(f"{name} is not idle: {lines}") from None

    def _answers(self) -> None:
        request = self._ask(12)
        self._until(lambda: request.over, "the next answer", 20)
        if request.outcome != "length" or request.tokens != self._expected[request.prompt][:12]:
            raise CellError(f"the next answer is wrong: {request.outcome}, {request.ends}, {request.errors}")

    def repair(self) -> None:
        """After a cell that failed: both workers anew, so that the next cell says something of its own."""
        self._resume()
        for name in PAIR:
            if self.cluster.workers[name].process.returncode is None:
                self.cluster.kill(name)
            self.cluster.install(name.partition("-")[0], name, self._launch(name, held=False))
        self.cluster.wait_for(*PAIR)
        self._warm()


def _reasons(request: LabRequest) -> list[str]:
    """What its client and the router were told."""
    said = [ended.reason for ends in request.ends.values() for ended in ends]
    return [*request.errors, *request.lost.values(), *said]
