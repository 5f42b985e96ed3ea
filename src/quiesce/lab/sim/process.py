"""One worker process: the real role between modelled edges, its clock, its pauses, its death."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiesce.core.lending import State as Lending
from quiesce.core.messages import Leg, TransferId
from quiesce.lab.sim.clock import LocalClock
from quiesce.lab.sim.edges import REGISTRY
from quiesce.lab.sim.engine import Memory, SimEngine
from quiesce.lab.sim.network import Owner
from quiesce.lab.sim.shadow import Shadow
from quiesce.lab.sim.transport import SimTransport
from quiesce.lab.sim.workers import ROLES
from quiesce.roles.sequence import Sequence
from quiesce.roles.settings import WorkerSettings
from quiesce.roles.worker import LONGEST_WAIT

if TYPE_CHECKING:
    from quiesce.lab.sim.cluster import Cluster

TURN = 0.002  # seconds until a loop that was woken looks


class Process(Owner):
    def __init__(self, cluster: Cluster, name: str, epoch: int, clock: LocalClock) -> None:
        self.cluster = cluster
        self.name = name
        self.epoch = epoch
        self.clock = clock
        self.alive = True
        self.life = cluster.restarts.get(name, 1)
        self.paused_until = 0.0
        self._wake = 0  # the newest of its plans to look; others are void
        self._wake_at = float("inf")
        world = cluster.world
        self.prefill = name.startswith("P")
        pages = world.prefill_pages if self.prefill else world.decode_pages
        self.engine = SimEngine(world, pages)
        self.memory: Memory = self.engine.memory
        cluster.active(self)
        cluster.net.owner = self
        self.transport = SimTransport(cluster.nic, self)
        role: Any = ROLES[world.direction, self.prefill]
        self.worker: Any = role(self._settings(), self.engine, self.transport)
        self.worker.transport = self.transport
        if not self.prefill:
            self.worker.committed, self.worker.waited = self._committed, cluster.waits
        elif world.direction == "pull":
            self.worker.lender.max_records = world.records
        else:
            self.worker.unanswered = lambda tid: self._broken("whoever hears ABORT answers it", tid)
            self.worker.borrower.max_records = world.records
        self.shadow = Shadow(
            self.worker.ledger, self.memory, cluster.nic.may_land, self._broken, cluster.strict, epoch
        )
        self.shadow.pulled_from = self.prefill and world.direction == "pull"
        self.shadow.rows_of_running = world.max_running
        self.owners = self.shadow.owners
        self._engine_thread()
        self.wake()

    def _settings(self) -> WorkerSettings:
        world = self.cluster.world
        return WorkerSettings(
            role="prefill" if self.prefill else "decode",
            name=self.name,
            model=Path("sim"),
            served_model_name="sim",
            registry=REGISTRY,
            registry_public_key=REGISTRY,
            keys=Path(),
            run_dir=Path("/sim"),
            epoch=self.epoch,
            page_size=world.page_size,
            max_total_tokens=max(2, world.prefill_pages if self.prefill else world.decode_pages) * world.page_size,
            chunked_prefill_size=world.chunk,
            max_running=world.max_running,
            max_queued=world.max_queued,
            schedule_conservativeness=world.conservativeness,
            reserve=world.reserve,
            hold_timeout=world.hold_timeout,
            direction=world.direction,
            allow_unproven=True,
            max_retained=world.max_retained,
        )

    def _engine_thread(self) -> None:
        thread, cluster = self.worker.thread, self.cluster
        thread.plan = self._in_the_step
        thread.later = self._step_ends
        thread.foreign = self._foreign
        thread.broken = self._read_broken
        thread.rng, thread.world = cluster.engine_rng, cluster.world

    def _in_the_step(self) -> list[TransferId]:
        steps = self.worker.steps
        seated = [] if steps.running is None else steps.running.sequences
        return [sequence.tid for sequence in (*(s for s, _ in self.worker.batch.under_way), *seated)]

    def _foreign(self, page: int, tid: TransferId) -> bool:
        """A step of this request must not write here."""
        owner = self.owners.get(page)
        return owner != tid and (owner is not None or self.cluster.strict)

    def _step_ends(self, seconds: float, end: Callable[[], None]) -> None:
        def ended() -> None:
            if self.alive:
                end()
                self.wake()

        self.cluster.loop.after(seconds, ended)

    # ------------------------------------------------------------ its loop

    def wake(self) -> None:
        self.wake_at(self.cluster.loop.now + TURN)

    def wake_at(self, when: float) -> None:
        when = max(when, self.paused_until)
        if self.alive and when < self._wake_at:
            self._wake += 1
            self._wake_at = when
            self.cluster.loop.at(when, self._turn, self._wake)

    def _turn(self, plan: int) -> None:
        if plan != self._wake or not self.alive:
            return
        now = self.cluster.loop.now
        if now < self.paused_until:
            self._wake_at = float("inf")
            self.wake_at(self.paused_until)
            return
        self._wake_at = float("inf")
        self.cluster.active(self)
        self.cluster.net.owner = self
        worker = self.worker
        try:
            worker.turn(0.0)
            over = worker._finished()
        except Exception as error:
            self.cluster.raised(error, self)
            return
        if self.shadow.changed:
            self.shadow.check()
            self.cluster.measure()
            if self.prefill and worker.standing().known > 2 * self.cluster.world.records:
                self._broken("what a prefill engine remembers is bounded", None)
        if worker.faults or worker.ledger.faults:
            self.cluster.broken(
                "no machine raises", self, detail=repr((self.cluster.faults.last, *worker.ledger.faults))
            )
        if over:
            self.cluster.exited(self)
            return
        self.wake_at(self.clock.true(self.clock.monotonic() + worker.timers.wait(LONGEST_WAIT)))

    def pause(self, seconds: float) -> None:
        """SIGSTOP: what arrives waits, the engine's step goes on."""
        self.paused_until = max(self.paused_until, self.cluster.loop.now + seconds)

    def die(self) -> None:
        self.alive = False
        self.worker.listener.close()
        self.worker.registration.link.close()
        if not self.prefill:
            for peer in self.worker.peers.peers.values():
                peer.link.close()
        self.cluster.nic.died(self.epoch)

    # ------------------------------------------------------------ what the oracle asks

    def under_way(self) -> int:
        """Of a prefill worker: transfers that are not over on its side. What is in doubt counts as over."""
        worker = self.worker
        if self.cluster.world.direction == "pull":
            held = sum(transfer.state is Lending.HOLDING for transfer in worker.lender.transfers.values())
            excused = self.cluster.world.fencing == "none"
            count: int = len(worker.lender.transfers) + len(worker.unattached)
            return count - (held if excused else 0)
        states = ("open", "failed", "done")
        records = worker.borrower.all_records()
        under_way: int = sum(record.count > 0 or record.state.value in states for record in records)
        return under_way + len(worker.posts)

    def lends(self, leg: Leg) -> bool:
        return self.shadow.lends(leg)

    def _broken(self, rule: str, tid: TransferId | None) -> None:
        self.cluster.broken(rule, self, tid)

    def _read_broken(self, kind: str, tid: TransferId, page: int) -> None:
        rule = {
            "read": "whoever reads a page finds its own bytes there",
            "step": "no step of an engine writes into a page that is not its request's any more",
        }[kind]
        self.cluster.broken(rule, self, tid, self.owners.get(page), page)

    def _committed(self, tid: TransferId, result: Any) -> None:
        sequence: Sequence | None = self.worker.generation.sequences.get(tid)
        if sequence is None:
            return  # its first token was its last
        prompt, pages = sequence.prompt_tokens, sequence.pages
        page = self.memory.wrong(pages, sequence.tokens, prompt, self.cluster.world.page_size)
        if page is not None:
            self.cluster.broken(
                "no request commits with a hole or with another request's bytes", self, tid, page=page
            )
