"""Runs one worker with faults of the lab, in a process of its own. The product never gets here."""

from __future__ import annotations

import ctypes
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from quiesce.lab.faulty import Decide, Fate, FaultyTransport, seeded
from quiesce.lab.lossy import Lossy, Mischief
from quiesce.lab.race.journal import GatedTransport, Journal, follow
from quiesce.lab.unsafe import (
    acks_by_room,
    commit_unchecked,
    errors_count_as_drained,
    free_at_once,
    keep_addresses,
    leases_by_the_clock,
    live_at,
    no_limit_but_the_context,
    place_anything,
    stub_what_does_not_fit,
)
from quiesce.ops.logs import configure_logging
from quiesce.roles import assembly
from quiesce.roles.colocated import ColocatedWorker
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.pull_lending import PullPrefillWorker
from quiesce.roles.pull_reading import PullDecodeWorker
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.worker import Worker
from quiesce.transfer import attach, trial
from quiesce.transfer.interface import Transport

PR_SET_PDEATHSIG = 1
PAUSE_POLL = 0.002  # seconds

Twin = Literal["", "errors drain", "acks by room", "no limit", "stub", "unchecked reads", "by clock"]


class Faults(msgspec.Struct, frozen=True):
    """What the posts of a worker meet (prefill's writes in push, decode's reads in pull), what its transport can
    prove, which release rule a decode worker has, and which guard is missing."""

    seed: int = 0
    hold: float = 0.0
    unknown: float = 0.0
    fail: float = 0.0
    ms_per_page: tuple[float, float] = (0.0, 0.0)
    release: Literal["proof", "at once"] = "proof"
    release_while: str = ""  # "at once" only while this file exists
    retract_every: int = 0  # steps; 0: only when the pool is short
    stuck_write: int = 0  # this post, counted from 1, stays in progress for ever; 0: none
    proves: bool = True  # False: a transport without fence, drain and proof of death
    mischief: tuple[Mischief, ...] = ()  # what this worker's messages meet
    gate: str = ""  # while this file exists its posts are held back
    journal: str = ""  # a file that tells what happened to each page
    twin: Twin = ""  # the guard that is taken out, see lab/unsafe.py
    first_token: int = 0  # of an answer to a prompt that nobody computed
    pause: str = ""  # while this file exists no step begins
    pause_after: int = 0  # ... once an answer has so many tokens
    unchecked: bool = False  # on tcp whatever comes is placed, lent or not
    time_ledger: bool = False  # its CPU time, in the worker's tables
    place: str = ""  # a file: on tcp the address of whoever wrote it is taken over
    keeps_addresses: bool = False  # on tcp what is queued for an address waits for whoever listens there next


class Spec(msgspec.Struct, frozen=True):
    settings: dict[str, Any]
    faults: Faults = Faults()
    held: bool = False  # load the model, then wait to be let go before there is a socket
    patience: float = 0.0  # seconds for an attachment; 0: the product's. For machines that are emulated


def settings_from(plain: dict[str, Any]) -> WorkerSettings:
    paths = {key: Path(plain[key]) for key in ("model", "keys", "run_dir")}
    return WorkerSettings(**{**plain, **paths})


def transport_for(settings: WorkerSettings, faults: Faults) -> Transport:
    transport = assembly.make_transport(settings)
    if faults.unchecked:
        place_anything(transport)
    if faults.place:
        live_at(transport, Path(faults.place))
    posts = settings.role == ("prefill" if settings.direction == "push" else "decode")
    if not posts and faults.proves:
        return transport
    decide = seeded(
        faults.seed,
        hold=faults.hold,
        unknown=faults.unknown,
        fail=faults.fail,
        ms_per_page=faults.ms_per_page,
    )
    if faults.stuck_write:
        decide = stuck(decide, faults.stuck_write)
    if faults.gate or faults.journal:
        journal = Journal(Path(faults.journal)) if faults.journal else None
        gate = Path(faults.gate) if faults.gate else None
        gated = GatedTransport(transport, decide, gate, journal, proves=faults.proves)
        if faults.keeps_addresses:
            keep_addresses(gated, transport)
        return gated
    return FaultyTransport(transport, decide, proves=faults.proves)


def stuck(decide: Decide, number: int) -> Decide:
    """As `decide`, but write `number` is held and nobody releases it."""
    writes = itertools.count(1)
    return lambda pages: Fate(hold=True) if next(writes) == number else decide(pages)


def main(path: str, let_go: Callable[[], bool]) -> int:
    """`let_go` waits, for one that is held; False: nobody is there any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever runs the lab may be killed
    spec = msgspec.json.decode(Path(path).read_bytes(), type=Spec)
    settings = settings_from(spec.settings)
    if spec.patience:
        attach.ATTACH_SECONDS = trial.SECONDS = spec.patience
    configure_logging(settings.log_level, settings.log_format, settings.name)
    if spec.faults.twin in ("no limit", "stub"):
        setattr(assembly, "refuse_pool", lambda *_: None)  # noqa: B010  (the module does not offer it)
    engine = assembly.make_engine(settings)
    if spec.held and not let_go():
        return 0
    if settings.role == "colocated":
        colocated = ColocatedWorker(settings, engine)
        retract_every(colocated, spec.faults.retract_every)
        return colocated.run()
    transport = transport_for(settings, spec.faults)
    worker = assembly.make_worker(settings, engine, transport)
    Lossy(worker, spec.faults.mischief)
    without_guard(worker, spec.faults)
    if spec.faults.journal and (settings.role == "decode") == (settings.direction == "push"):
        follow(worker.ledger, Journal(Path(spec.faults.journal)))
    if spec.faults.pause:
        pause_while(worker, Path(spec.faults.pause).exists, spec.faults.pause_after)
    if isinstance(worker, PrefillWorker):
        return worker.run()
    if spec.faults.release == "at once":
        asked = Path(spec.faults.release_while)
        free_at_once(worker.ledger, asked.exists if spec.faults.release_while else lambda: True)
    retract_every(worker, spec.faults.retract_every)
    if spec.faults.time_ledger:
        time_ledger(worker)
    return worker.run()


def pause_while(worker: Worker, asked: Callable[[], bool], after: int = 0) -> None:
    """No step begins while it is asked for, and an answer has `after` tokens; one that is under way ends, and
    everything else goes on."""
    launch = worker.steps.launch

    def launch_or_wait() -> bool:
        if asked() and (not after or any(s.generated >= after for s in worker.steps.batch.members.values())):
            worker.timers.after(PAUSE_POLL, "pause", lambda: None)
            return False
        return launch()

    worker.steps.launch = launch_or_wait  # type: ignore[method-assign]


def time_ledger(worker: DecodeWorker) -> None:
    """Adds `ledger_seconds` and `steps` to what the worker tells: the calling thread's CPU time in the ledger and in
    all that watches it, since the start."""
    spent = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*arguments: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                spent += time.thread_time() - began

        return outer

    for name in ("own", "grow", "lend", "close", "end"):
        setattr(worker.ledger, name, timed(getattr(worker.ledger, name)))
    tables = worker.tables
    worker.tables = lambda: {**tables(), "ledger_seconds": spent, "steps": worker.thread.steps}  # type: ignore[method-assign]


def without_guard(worker: PrefillWorker | DecodeWorker, faults: Faults) -> None:
    match faults.twin, worker:
        case "", _:
            return
        case "errors drain", PrefillWorker():
            errors_count_as_drained(worker)
        case "stub", PrefillWorker():
            stub_what_does_not_fit(worker, faults.first_token)
        case "unchecked reads", PullDecodeWorker():
            commit_unchecked(worker)
        case "acks by room", DecodeWorker():
            acks_by_room(worker)
        case "by clock", PullPrefillWorker():
            leases_by_the_clock(worker)
        case "no limit", DecodeWorker():
            no_limit_but_the_context(worker)
        case _:
            raise ValueError(f"a {worker.role} worker has no twin {faults.twin!r}")


def retract_every(worker: DecodeWorker | ColocatedWorker, every: int) -> None:
    """Retracts the youngest answer before every n-th step, as a short pool would, and takes it back when it fits.
    One that has not got a token further since the last time is left alone, or it never would."""
    steps = worker.steps
    launch, turns = steps.launch, itertools.count(1)
    length: dict[str, int] = {}  # rid -> tokens when it was last retracted

    def launch_after_retraction() -> bool:
        if every and not steps.thread.busy:
            moved = [m for m in steps.batch.members.values() if len(m.tokens) > length.get(m.rid, 0)]
            if moved and next(turns) % every == 0:
                youngest = max(moved, key=lambda member: member.precedence)
                length[youngest.rid] = len(youngest.tokens)
                steps.tell.retract(youngest)
                worker.generation.resume()
        return launch()

    steps.launch = launch_after_retraction  # type: ignore[method-assign]
