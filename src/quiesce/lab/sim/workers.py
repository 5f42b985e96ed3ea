"""The product's workers, with the little that the oracle must hear from inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiesce.channel.frames import Received
from quiesce.core.machine import Action, Committed, Post, Send
from quiesce.core.messages import Abort, Leg, TransferId
from quiesce.lab.sim.transport import SimTransport
from quiesce.roles.decode import DecodeWorker
from quiesce.roles.prefill import PrefillWorker
from quiesce.roles.pull_lending import PullPrefillWorker
from quiesce.roles.pull_reading import PullDecodeWorker
from quiesce.roles.worker import Worker


def _names(worker: Any, action: Action) -> None:
    """Tells the model which transfer a post is about; a transport need not know."""
    if isinstance(action, Post):
        transport: SimTransport = worker.transport
        transport.leg = action.leg


class SimPrefill(PrefillWorker):
    said: Leg | None = None
    unanswered: Callable[[TransferId], None]

    def act(self, action: Action) -> None:
        _names(self, action)
        if isinstance(action, Send):
            self.said = action.message.leg
        super().act(action)

    def heard(self, received: Received) -> None:
        """Whoever is asked by ABORT answers at once, be it that it cannot say yet (guards A3, N8)."""
        message = received.message
        self.said = None
        super().heard(received)
        if isinstance(message, Abort) and message.leg.p_epoch == self.epoch and self.said != message.leg:
            speaker = self.peers.speaker(received)
            known = speaker in self.borrower.lenders and self.borrower.known < 2 * self.borrower.max_records
            if known and speaker == message.leg.tid.epoch:
                self.unanswered(message.leg.tid)


class SimDecode(DecodeWorker):
    """Looks at what it commits."""

    committed: Callable[[TransferId, Any], None]
    waited: list[float]

    def begin(self, tid: TransferId, prefill: int, remaining_ms: int) -> None:
        leg = self.generation.by_tid[tid]
        assert leg.left_queue is not None
        self.waited.append(leg.left_queue - leg.arrived)
        super().begin(tid, prefill, remaining_ms)

    def act(self, action: Action) -> None:
        _names(self, action)
        super().act(action)
        if isinstance(action, Committed):
            self.committed(action.tid, action.result)


class SimPullDecode(SimDecode, PullDecodeWorker):
    """The same where decode reads."""


ROLES: dict[tuple[str, bool], type[Worker]] = {
    ("push", True): SimPrefill,
    ("push", False): SimDecode,
    ("pull", True): PullPrefillWorker,
    ("pull", False): SimPullDecode,
}
