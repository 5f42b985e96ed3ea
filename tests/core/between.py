"""What lies between the processes of a hand-off, in push and in pull: a wire that keeps all mail, clocks, and deaths.

A message that was sent may be delivered never, late, twice or out of order; a clock runs out when it is chosen.
"""

from __future__ import annotations

from typing import Any

from quiesce.core.machine import Action, Arm, Fired, Heard, Revoke, Send, Timer


class Between:
    """A world of `ranks` prefill processes and one decode process. A subclass starts them, and hears for them in
    `decode_hears(event)` and `prefill_hears(prefill, event)`."""

    decode_hears: Any
    prefill_hears: Any
    start_prefill: Any
    consistent: Any  # what must hold at every moment
    quiesce: Any  # everything that can end ends
    check_quiet: Any  # and what must hold then

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._epochs = 0
        self.wire: list[tuple[int, Heard]] = []  # (to epoch, message and speaker): never consumed
        self.unread: list[int] = []  # indices into wire that were not delivered yet
        self.timers: dict[tuple[int, object, object], Fired] = {}
        self.revokes: list[tuple[int, Revoke]] = []
        self.decodes: list[Any] = []
        self.prefills: dict[int, Any] = {}  # by epoch, dead ones too
        self.current: dict[int, Any] = {}  # by rank
        self.committed = self.lost = 0

    # ------------------------------------------------------------ processes

    def _epoch(self) -> int:
        self._epochs += 1
        return self._epochs

    @property
    def decode(self) -> Any:
        return self.decodes[-1]

    def crash_prefill(self, pick: int) -> None:
        """The successor runs at once; decode hears of it when `notice` is called, which may be much later."""
        old = self.current[pick % self.ranks]
        old.alive = False
        self.start_prefill(old.rank)

    def dead_prefills(self) -> list[int]:
        return [prefill.epoch for prefill in self.prefills.values() if not prefill.alive]

    def dead_decodes(self) -> list[int]:
        return [decode.epoch for decode in self.decodes if not decode.alive]

    # ------------------------------------------------------------ the network and the clock

    def deliver(self, pick: int) -> None:
        """Any message that was ever sent; mostly one that was not read yet."""
        if self.wire:
            unread = self.unread and pick % 8
            self._deliver(self.unread.pop(pick % len(self.unread)) if unread else pick % len(self.wire))

    def _deliver(self, index: int) -> None:
        to, heard = self.wire[index]
        if to == self.decode.epoch:
            self.decode_hears(heard)
        elif (prefill := self.prefills.get(to)) is not None:
            self.mail(prefill, heard)

    def mail(self, prefill: Any, heard: Heard) -> None:
        if prefill.alive:
            self.prefill_hears(prefill, heard)

    def deliver_all(self) -> None:
        unread, self.unread = self.unread, []
        for index in unread:
            self._deliver(index)

    def fire(self, pick: int) -> None:
        """Some clock runs out; a deadline, which ends a good transfer, only now and then."""
        running = [key for key in self.timers if key[1] is not Timer.DEADLINE or pick % 16 == 0]
        if running:
            self._fire(running[pick % len(running)])

    def fire_all(self) -> None:
        for key in list(self.timers):
            self._fire(key)

    def _fire(self, key: tuple[int, object, object]) -> None:
        fired = self.timers.pop(key)
        if key[0] == self.decode.epoch:
            self.decode_hears(fired)
        elif (prefill := self.prefills.get(key[0])) is not None and prefill.alive:
            self.prefill_hears(prefill, fired)

    def _put(self, to: int, heard: Heard) -> None:
        self.unread.append(len(self.wire))
        self.wire.append((to, heard))

    def _common(self, me: int, action: Action) -> None:
        match action:
            case Send(to, message):
                self._put(to, Heard(message, me))
            case Arm(timer, about, attempt):
                self.timers[me, timer, about] = Fired(timer, about, attempt)
            case _:
                raise AssertionError(f"{action} from the wrong side")

    # ------------------------------------------------------------ invariants

    @staticmethod
    def check_books(books: list[Any]) -> None:
        for book in books:
            census = book.census()
            parts = census.free + census.owned + census.cached + census.held + census.retained
            assert parts == census.total
            assert book.unsound == 0
