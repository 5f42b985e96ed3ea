"""How posts become jobs and jobs become outcomes, against a mover that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from quiesce.core.messages import Grant
from quiesce.transfer import mover_wire as wire
from quiesce.transfer import shm_poster
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.interface import Arena, Outcome, Peer, Post
from quiesce.transfer.shm_poster import JOBS_AT_MOVER, STALL_SECONDS, Poster
from quiesce.transfer.watch import Watch

PAGES = 100
GRANT = Grant(0, 1, tuple(range(PAGES)))


class ScriptedMover:
    """Takes packets, and says what the test has it say."""

    started = 0.0
    made: list[ScriptedMover]

    def __init__(
        self,
        watch: Watch,
        arena: Arena,
        on_packet: Callable[[object], None],
        on_exit: Callable[[], None],
        writes: bool = False,
    ) -> None:
        self.says, self.dies = on_packet, on_exit
        self.heard: list[wire.Packet] = []
        self.full = False
        self.made.append(self)

    def send(self, packet: wire.Packet) -> bool:
        if not self.full:
            self.heard.append(packet)
        return not self.full

    def want_writable(self, wanted: bool) -> None: ...

    def kill(self) -> None:
        self.dies()

    def jobs(self) -> list[wire.Job]:
        return [packet for packet in self.heard if isinstance(packet, wire.Job)]


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedMover]:
    ScriptedMover.made = []
    monkeypatch.setattr(shm_poster, "MoverProcess", ScriptedMover)
    return ScriptedMover.made


def at(monkeypatch: pytest.MonkeyPatch, now: float) -> float:
    monkeypatch.setattr(shm_poster.time, "monotonic", lambda: now)
    return now


def test_a_mover_that_has_work_and_does_not_move_is_killed_and_its_posts_end_clean(
    movers: list[ScriptedMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = at(monkeypatch, 1000.0)
    poster, peer = connected()
    movers[0].says(wire.Attached(peer.number, 1))
    poster.tick(start)
    assert poster.next_deadline() is None, "a mover without work owes nothing"
    post = poster.write(peer, range(20), range(20), GRANT)
    assert poster.next_deadline() == start + STALL_SECONDS
    movers[0].says(wire.Placed([movers[0].jobs()[0].id]))
    poster.tick(at(monkeypatch, start + 20.0))
    poster.tick(at(monkeypatch, start + 49.0))  # it moved 29 s ago
    assert not poster.ended and len(movers) == 1
    poster.tick(at(monkeypatch, start + 90.0))  # far too late: we were away ourselves, so it gets time to speak
    assert not poster.ended
    poster.tick(at(monkeypatch, start + 90.8))
    assert poster.ended == [(post, Outcome.FAILED_CLEAN)] and poster.counters["mover_stalls"] == 1
    poster.tick(start + 90.8)
    assert len(movers) == 2 and poster.next_deadline() is not None, "the next one must attach"
    poster.tick(at(monkeypatch, start + 120.8))
    assert len(movers) == 2 and poster.counters["mover_stalls"] == 2, "one that does not even attach is ended, too"


def connected(max_transfer_pages: int = 10, max_open_posts: int = 100) -> tuple[Poster, Peer]:
    poster = Poster(Watch(), max_transfer_pages, max_open_posts, max_peers=4)
    poster.use(shared_arena(PAGES, 64))
    descriptor = wire.Descriptor("shm", "/nowhere", b"t", 0xD, 0, PAGES, 64)
    return poster, poster.connect(msgspec.msgpack.encode(descriptor), 0xB)


def post(poster: Poster, peer: Peer, pages: int, start: int = 0) -> Post:
    return poster.write(peer, range(pages), range(start, start + pages), GRANT)


def test_l8_a_post_is_split_and_its_jobs_stay_in_order(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    post(poster, peer, 35)
    sizes = [len(job.src) // 4 for job in movers[0].jobs()]
    assert sizes == [10, 10, 10, 5]
    assert b"".join(job.dst for job in movers[0].jobs()) == b"".join(page.to_bytes(4, "little") for page in range(35))


def test_a10_a_split_post_ends_when_all_its_siblings_have_ended(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    one = post(poster, peer, 30)
    first, second, third = movers[0].jobs()
    movers[0].says(wire.Dropped(second.id, "because"))
    movers[0].says(wire.Placed([first.id]))
    assert not poster.ended and poster.open_posts(peer) == 1
    movers[0].says(wire.Placed([third.id]))
    assert poster.ended == [(one, Outcome.FAILED_CLEAN)] and poster.open_posts(peer) == 0


def test_l8_the_first_failure_ends_the_loop(movers: list[ScriptedMover]) -> None:
    poster, peer = connected(max_transfer_pages=5)
    one = post(poster, peer, 100)
    other = post(poster, peer, 5)
    sent = movers[0].jobs()
    assert len(sent) == JOBS_AT_MOVER
    for job in sent:
        movers[0].says(wire.Dropped(job.id, "because"))
    assert poster.ended == [(one, Outcome.FAILED_CLEAN)]
    (left,) = movers[0].jobs()[JOBS_AT_MOVER:]
    movers[0].says(wire.Placed([left.id]))
    assert poster.ended[1:] == [(other, Outcome.PLACED)]


def test_a11_every_post_is_counted_until_its_own_outcome(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    posts = [post(poster, peer, 10) for _ in range(3)]
    for done, job in enumerate(movers[0].jobs()):
        assert poster.open_posts(peer) == 3 - done
        movers[0].says(wire.Placed([job.id]))
    assert [each for each, _ in poster.ended] == posts


def test_a9_a_dying_mover_leaves_no_doubt(movers: list[ScriptedMover]) -> None:
    """Nothing ends while it may still write, everything once it cannot; what it finished counts."""
    poster, peer = connected(max_transfer_pages=5)
    one, two, three = post(poster, peer, 5), post(poster, peer, 100), post(poster, peer, 5)
    movers[0].says(wire.Placed([movers[0].jobs()[0].id]))
    assert poster.ended == [(one, Outcome.PLACED)]
    movers[0].dies()
    assert sorted(poster.ended[1:], key=lambda ended: ended[0].id) == [
        (two, Outcome.FAILED_CLEAN),
        (three, Outcome.FAILED_CLEAN),
    ]
    assert poster.open_posts(peer) == 0


def test_a2_a_cancelled_post_never_started(movers: list[ScriptedMover]) -> None:
    poster, peer = connected(max_transfer_pages=10)
    running = [post(poster, peer, 10) for _ in range(JOBS_AT_MOVER)]
    queued, last = post(poster, peer, 20), post(poster, peer, 10)
    assert not any(poster.try_cancel(each) for each in running)
    assert poster.try_cancel(queued) and not poster.try_cancel(queued)
    for job in movers[0].jobs():
        movers[0].says(wire.Placed([job.id]))
    movers[0].says(wire.Placed([movers[0].jobs()[-1].id]))
    assert [each for each, _ in poster.ended] == [*running, last], "and it is not told again"


def test_a12_refusals_are_outcomes_and_never_exceptions(movers: list[ScriptedMover]) -> None:
    poster, peer = connected(max_open_posts=1)
    refused = [
        poster.write(peer, [0], [PAGES], Grant(0, 1, (PAGES,))),
        poster.write(peer, [-1], [0], GRANT),
        poster.write(peer, [0, 1], [0], GRANT),
        poster.write(peer, [0], [1], Grant(0, 1, (0,))),
        poster.write(Peer(9, 99), [0], [0], GRANT),
    ]
    assert poster.ended == [(each, Outcome.FAILED_CLEAN) for each in refused]
    assert not movers[0].jobs()
    empty = poster.write(peer, [], [], GRANT)
    assert poster.ended[-1] == (empty, Outcome.PLACED)
    post(poster, peer, 1)
    beyond = post(poster, peer, 1)
    assert poster.ended[-1] == (beyond, Outcome.FAILED_CLEAN), "the number of open posts is bounded"
    movers[0].dies()
    while_away = post(poster, peer, 1)
    assert poster.ended[-1] == (while_away, Outcome.FAILED_CLEAN)


def test_a_full_socket_keeps_the_order(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    movers[0].full = True
    posts = [post(poster, peer, 10) for _ in range(3)]
    movers[0].full = False
    poster.tick(0.0)
    for job in movers[0].jobs():
        movers[0].says(wire.Placed([job.id]))
    assert [each for each, _ in poster.ended] == posts


def test_a_crash_loop_backs_off_and_a_working_mover_does_not(
    movers: list[ScriptedMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = at(monkeypatch, 1000.0)
    poster, peer = connected()

    def crash() -> float:
        """Seconds until the next start."""
        movers[-1].started = now
        movers[-1].dies()
        due = poster.next_deadline()
        assert due is not None
        poster.tick(due)
        return due - now

    waits = [crash() for _ in range(8)]
    assert waits[0] < 0.01 and waits[-1] >= shm_poster.RETRY_MOST
    assert all(a < b or b > shm_poster.RETRY_MOST - 0.1 for a, b in pairwise(waits))
    assert len(movers) == 9
    post(poster, peer, 1)
    movers[-1].says(wire.Placed([movers[-1].jobs()[0].id]))
    assert crash() < 0.01


def test_every_connection_is_attached_anew_after_a_restart(movers: list[ScriptedMover]) -> None:
    poster, _ = connected()
    asked = movers[0].heard[0]
    movers[0].dies()
    due = poster.next_deadline()
    assert due is not None
    poster.tick(due)
    assert movers[1].heard == [asked]


def test_a_lender_that_is_gone_for_good_is_not_asked_again(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    movers[0].says(wire.Attached(peer.number, 7))
    movers[0].says(wire.Lost(peer.number, "closed", False))
    assert [(lost.peer_epoch, lost.generation, lost.final) for lost in poster.lost_peers] == [(0xD, 7, False)]
    due = poster.next_deadline()
    assert due is not None
    poster.tick(due)
    assert len(movers[0].heard) == 2
    movers[0].says(wire.Lost(peer.number, "no such file", True))
    assert poster.next_deadline() is None and poster.lost_peers[1].final and len(poster.lost_peers) == 2


def test_disconnecting_waits_for_what_is_in_flight(movers: list[ScriptedMover]) -> None:
    poster, peer = connected()
    one = post(poster, peer, 10)
    poster.disconnect(peer)
    assert movers[0].heard[-1] == wire.Detach(peer.number) and not poster.ended
    assert poster.open_posts(peer) == 1
    movers[0].says(wire.Dropped(movers[0].jobs()[0].id, "disconnected"))
    assert poster.ended == [(one, Outcome.FAILED_CLEAN)]
