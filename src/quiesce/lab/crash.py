"""The crash matrix: every role killed, stopped and restarted while a request is in every state.

`python -m quiesce.lab.crash MODEL --rounds 10`. Each cell has a request that does not need the victim any more (the
bystander, decoding) and one in the state of the cell. Then: whoever waits is told soon or answered right, every leg
has one last word, nobody else restarted, all are idle, and the next answer is right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quiesce.core.messages import Sampling
from quiesce.lab.cluster import LabRequest
from quiesce.lab.idle import not_idle
from quiesce.lab.patient import CHUNK, DECODE, PAGE, PAIR, PREFILL, PatientRouter, mover_of
from quiesce.lab.worker import Faults

VICTIMS = ("prefill", "decode", "mover", "router")
ACTIONS = ("kill", "stop short", "stop long", "restart")
STATES = ("queued", "mid-transfer", "landed", "decoding")
ROLES = ("prefill", "decode")

HEARD_WITHIN = 5.0  # seconds from a death to the client's error
SHORT = 0.6  # seconds of a short stop
AWAY = 0.5  # seconds without a router
PROMPT = 120  # tokens
POOL = 512  # tokens: the bystander and one more request, if that is short
MS_PER_PAGE = 40.0
BYSTANDER, SUBJECT, QUEUED = 200, 56, 150  # tokens of the answers; the last one does not fit beside the bystander

Oracle = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Cell:
    victim: str
    action: str
    state: str

    def __str__(self) -> str:
        return f"{self.victim} {self.action} {self.state}".replace(" ", "-")


CELLS = [Cell(victim, action, state) for state in STATES for action in ACTIONS for victim in VICTIMS]


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
    """One cluster that lives through the cells. `spares`: successors that have loaded the model already."""

    cluster: PatientRouter
    oracle: Oracle
    seed: int = 1
    spares: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    boot: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self._draw = draw
        prompts = [[draw.randrange(8, 500) for _ in range(PROMPT)] for _ in range(8)]
        self._expected = dict(zip(map(tuple, prompts), self.oracle(prompts, BYSTANDER), strict=True))
        for name in PAIR:
            self.cluster.install(name.partition("-")[0], name, self._launch(name, held=False))
        self.cluster.wait_for(*PAIR)
        self._warm()

    def _launch(self, name: str, held: bool) -> subprocess.Popen[bytes]:
        faults = Faults(ms_per_page=(MS_PER_PAGE, MS_PER_PAGE)) if name == PREFILL else Faults()
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
        """Two requests, the second of them in the state of the cell."""
        bystander = self._ask(BYSTANDER)
        self.cluster.until(lambda: bool(bystander.tokens), 20, "the bystander's first token")
        subject = self._ask(QUEUED if cell.state == "queued" else SUBJECT)
        if cell.state == "queued":
            self._until(lambda: self.cluster.inspect(DECODE)["waiting"] == 1, "a request to wait for pages")
        elif cell.state == "decoding":
            self._until(lambda: len(subject.tokens) >= 3, "three tokens")
        else:
            self._until(lambda: self.cluster.inspect(PREFILL)["posts"] > 0, "a transfer under way")
            if cell.state == "landed":  # every page is there and DONE is on its way; decode has not read it yet
                self._signal(DECODE, signal.SIGSTOP)
                self._until(lambda: "done" in self.cluster.inspect(PREFILL)["records"], "prefill to be done")
        return Moment(bystander, subject)

    def _until(self, condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
        self.cluster.until(lambda: bool(condition()), seconds, what)

    def _signal(self, name: str, number: int) -> None:
        os.kill(self.cluster.workers[name].process.pid, number)

    def _resume(self) -> None:
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
            time.sleep(SHORT)
            return
        self._stop(cell)
        self.cluster.until_time(SHORT)
        if any(request.errors for request in moment.requests):
            raise CellError(f"a stop of {SHORT} s cost a request: {moment}")
        self._continue(cell)

    def _stop_long(self, cell: Cell, moment: Moment) -> None:
        if cell.victim == "router":
            time.sleep(self.cluster.hold + SHORT)
            return
        began = time.monotonic()
        self._stop(cell)
        needy = self._needy(cell, moment)
        within = self.cluster.hold + 2.0
        self._until(lambda: all(request.told for request in needy), "word of the stopped process", within)
        survivors = [name for name in PAIR if not name.startswith(cell.victim) or cell.victim == "mover"]
        if cell.state != "landed" or cell.victim == "decode":
            for name in survivors:
                self._idle(name, while_stopped=cell.victim)
        self.cluster.until_time(max(0.0, began + self.cluster.hold + SHORT - time.monotonic()))
        self._continue(cell)

    def _needy(self, cell: Cell, moment: Moment) -> list[LabRequest]:
        """Whose answer depends on the victim."""
        if cell.victim == "decode":
            return list(moment.requests)
        if cell.state in ("decoding", "landed"):
            return []
        return [moment.subject]

    def _stop(self, cell: Cell) -> None:
        self._stopped = self._mover() if cell.victim == "mover" else None
        if self._stopped is None:
            self._signal(f"{cell.victim}-0", signal.SIGSTOP)
        else:
            os.kill(self._stopped, signal.SIGSTOP)
        if cell.state == "landed" and cell.victim != "decode":
            self._signal(DECODE, signal.SIGCONT)

    def _continue(self, cell: Cell) -> None:
        if self._stopped is None:
            self._signal(f"{cell.victim}-0", signal.SIGCONT)
            return
        with contextlib.suppress(ProcessLookupError):  # it was ended for not moving
            os.kill(self._stopped, signal.SIGCONT)

    def _mover(self, default: int | None = None) -> int:
        found = mover_of(self.cluster.workers[PREFILL].process.pid)
        if found is None and default is None:
            raise CellError("prefill has no mover")
        return found or default or 0

    def _replace(self, name: str) -> None:
        self.cluster.install(name.partition("-")[0], name, self.spares.pop(name))
        self.cluster.wait_for(name)

    def _router_leaves(self, moment: Moment, seconds: float) -> None:
        self.cluster.router_dies()
        for request in moment.requests:
            request.errors.append("the router is gone")
            request.lost.update(dict.fromkeys(PAIR, "the router is gone"))
        time.sleep(seconds)
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
            if self._must_succeed(cell, request is moment.bystander) and request.outcome != "length":
                raise CellError(f"{who} was not answered: {request.ends}, {request.errors}, {request.lost}")

    @staticmethod
    def _must_succeed(cell: Cell, bystander: bool) -> bool:
        if cell.action == "stop short" or (cell.victim == "router" and cell.action == "stop long"):
            return True
        if cell.victim in ("decode", "router"):
            return False
        if bystander or cell.state == "decoding":
            return True
        if cell.action == "stop long":
            return cell.state == "landed"
        return cell.state == "queued" and cell.victim == "mover"  # a DONE on its way may go down with its speaker

    def _settled(self) -> None:
        for name in PAIR:
            self._idle(name)

    def _idle(self, name: str, while_stopped: str = "") -> None:
        """Within hold timeout + 2 s. A borrower remembers what a lender that cannot speak now has not closed."""
        lines: list[str] = ["it did not answer"]

        def idle() -> bool:
            state = self.cluster.inspect(name)
            boot = self.boot[name]
            same = boot if state["epoch"] == boot["epoch"] and not while_stopped else None
            lines[:] = not_idle(state, same)
            if while_stopped == "decode":
                lines[:] = [line for line in lines if not line.startswith("records:")]
            return not lines

        try:
            self.cluster.until(idle, self.cluster.hold + 2.0, f"{name} to be idle")
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
            if self.cluster.workers[name].process.poll() is None:
                self.cluster.kill(name)
            self.cluster.install(name.partition("-")[0], name, self._launch(name, held=False))
        self.cluster.wait_for(*PAIR)
        self._warm()


# ------------------------------------------------------------ many rounds


def rounds(matrix: Matrix, count: int) -> Iterator[tuple[int, Cell, float, str]]:
    for number in range(count):
        for cell in CELLS:
            began = time.monotonic()
            trouble = ""
            try:
                matrix.run(cell)
            except (CellError, TimeoutError, RuntimeError) as error:
                trouble = str(error)
                matrix.repair()
            yield number, cell, time.monotonic() - began, trouble


def main() -> int:
    from quiesce.engine.engine import Engine  # noqa: PLC0415
    from quiesce.engine.local import LocalEngine  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m quiesce.lab.crash", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a small model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hold-timeout", type=float, default=2.0)
    parser.add_argument("--only", default="", help="part of the names of the cells to run")
    asked = parser.parse_args()
    local = LocalEngine(Engine(asked.model, dtype="float32", page_size=PAGE, pool_pages=512, deterministic=True))

    def oracle(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = [Sampling(max_tokens=tokens, ignore_eos=True)] * len(prompts)
        return local.generate(prompts, sampling, chunk=CHUNK, concurrency=4)

    CELLS[:] = [cell for cell in CELLS if asked.only in str(cell)]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="qs-") as folder:
        log = Path(folder).parent / f"{Path(folder).name}.log"
        with PatientRouter(asked.model, Path(folder), log, hold_timeout=asked.hold_timeout) as cluster:
            for number, cell, seconds, trouble in rounds(Matrix(cluster, oracle), asked.rounds):
                failed += bool(trouble)
                print(f"{number:3d} {cell!s:32} {seconds:5.1f} s  {trouble or 'ok'}", flush=True)
    print(f"{failed} cells failed; the workers' log is {log}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
