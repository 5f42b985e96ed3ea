"""Which engine a pair of processes uses, and that engines behind one interface do not mix."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.core.messages import Grant
from quiesce.core.posting import Outcome
from quiesce.transfer.arena import shared_arena
from quiesce.transfer.choice import Choice, merged, this_host
from quiesce.transfer.interface import Transport
from quiesce.transfer.shm import CAPABILITIES as SHM
from quiesce.transfer.shm import ShmTransport
from quiesce.transfer.tcp import CAPABILITIES as TCP
from quiesce.transfer.tcp import TcpTransport

PAGES, PAGE_BYTES = 8, 4096
D, P = 0xD, 0xB
NOT_ONE_HOST = "shm would need one host, one user and one PID namespace"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Choice]]:
    """`made(epoch, "shm", "tcp", host=...)`: those engines, best first."""
    all_made: list[Choice] = []

    def make(epoch: int, *names: str, host: str | None = None, direction: Any = "push") -> Choice:
        engines: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(tmp_path, epoch, direction=direction),
            "tcp": lambda: TcpTransport(epoch),
        }
        choice = Choice([engines[name]() for name in names], epoch)
        choice._host = host or choice._host
        choice.register(shared_arena(PAGES, PAGE_BYTES))
        all_made.append(choice)
        return choice

    yield make
    for choice in all_made:
        choice.close_all()


def until(condition: Callable[[], Any], *sides: Choice) -> Any:
    deadline = time.monotonic() + 60
    while True:
        for side in sides:
            side.events()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline
        select.select(sides, [], [], 0.2)


def shake(decode: Choice, prefill: Choice, *, pull: bool = False) -> tuple[bytes, bytes]:
    """As HELLO and WELCOME do it."""
    hello = decode.descriptor(P)
    welcome = prefill.reply(D, hello, pull=pull)
    decode.settle(P, welcome)
    return hello, welcome


@pytest.mark.parametrize(
    ("here", "there", "host", "picked", "why"),
    [
        (("shm", "tcp"), ("shm", "tcp"), None, "shm", "both are on one host"),
        (
            ("shm", "tcp"),
            ("shm", "tcp"),
            "elsewhere",
            "tcp",
            "shm would need one host, one user and one PID namespace",
        ),
        (("shm", "tcp"), ("tcp",), None, "tcp", "shm is not offered"),
        (("tcp",), ("shm", "tcp"), None, "tcp", "the only one here"),
        (("tcp", "shm"), ("shm", "tcp"), None, "tcp", "the only one here"),
    ],
)
def test_the_best_that_both_have_is_picked_and_both_say_why(
    made: Callable[..., Choice],
    here: tuple[str, ...],
    there: tuple[str, ...],
    host: str | None,
    picked: str,
    why: str,
) -> None:
    decode, prefill = made(D, *there, host=host), made(P, *here)
    shake(decode, prefill)
    said = {f"{P:016x}": f"{picked}: {why}"}
    assert decode.report()["peers"] == said
    assert list(prefill.report()["peers"].values()) == list(said.values())
    assert [engine["engine"] for engine in prefill.report()["engines"]] == list(here)


def test_nothing_in_common_is_said_with_both_lists(made: Callable[..., Choice]) -> None:
    decode, prefill = made(D, "shm", host="elsewhere"), made(P, "shm")
    with pytest.raises(ValueError, match="none in common: shm there, shm here"):
        shake(decode, prefill)
    with pytest.raises(ValueError, match="none in common: tcp there, shm here"):
        shake(made(D, "tcp"), prefill)


def test_what_is_no_offer_is_refused(made: Callable[..., Choice]) -> None:
    decode, prefill = made(D, "tcp"), made(P, "tcp")
    hello, welcome = shake(decode, prefill)
    for wrong in (b"", b"\xc1", hello[:-3], welcome):
        with pytest.raises(ValueError, match="engines"):
            prefill.reply(D, wrong)
    with pytest.raises(ValueError, match="engines of its own"):
        prefill.reply(0xE, hello)  # D's, said by somebody else
    with pytest.raises(ValueError, match="picked no engine"):
        decode.settle(P, hello)
    with pytest.raises(ValueError, match="picked no engine"):
        decode.settle(0xE, welcome)


def test_an_epoch_keeps_its_engine(made: Callable[..., Choice]) -> None:
    decode, prefill = made(D, "shm", "tcp"), made(P, "shm", "tcp")
    shake(decode, prefill)
    elsewhere = made(D, "shm", "tcp", host="elsewhere")
    with pytest.raises(ValueError, match="none in common"):
        prefill.reply(D, elsewhere.descriptor(P))
    other = made(P, "tcp")
    with pytest.raises(ValueError, match="it changes from shm to tcp"):
        decode.settle(P, other.reply(D, made(D, "tcp").descriptor(P)))


@pytest.mark.parametrize("pull", [False, True])
def test_two_engines_at_once_do_not_mix(made: Callable[..., Choice], pull: bool) -> None:
    """One peer on this host and one elsewhere: shm and tcp number their posts and peers alike."""
    direction = "pull" if pull else "push"
    near, far = made(1, "shm", "tcp", direction=direction), made(2, "shm", "tcp", host="elsewhere")
    hub = made(3, "shm", "tcp", direction=direction)
    posts, ended = {}, {}
    for epoch, other in ((1, near), (2, far)):
        hello = other.descriptor(3)
        if pull:
            hello = hub.descriptor(epoch)
            peer = hub.connect(other.reply(3, hello, pull=True), 3)
        else:
            other.settle(3, hub.reply(epoch, hello))
            peer = hub.connect(hello, 3)
        lend = lambda other=other: other.lend(3, range(PAGES), access="read" if pull else "write")  # noqa: E731
        grant = Grant(0, until(lend, near, far, hub), tuple(range(PAGES)))
        move = hub.read if pull else hub.write
        posts[epoch] = [move(peer, [page], [page], grant) for page in range(PAGES)]
    assert len({post.id for both in posts.values() for post in both}) == 2 * PAGES

    def all_ended() -> bool:
        ended.update(hub.poll())
        return len(ended) == 2 * PAGES

    until(all_ended, near, far, hub)
    assert set(ended.values()) == {Outcome.PLACED}
    assert all(hub.drain(post.peer) for both in posts.values() for post in both)
    placed = {name: count for name, count in hub.counters().items() if name.endswith("placed_pages")}
    assert placed == {"shm_placed_pages": PAGES, "tcp_placed_pages": PAGES}
    for both in posts.values():
        hub.disconnect(both[0].peer)
        hub.disconnect(both[0].peer)  # twice is harmless


def test_a12_a_post_that_raised_loses_no_other_post_its_outcome(
    made: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine had taken the post before it raised, and tells of its end all the same, beside those of others."""
    decode, prefill = made(D, "tcp"), made(P, "tcp")
    hello, _ = shake(decode, prefill)
    peer = prefill.connect(hello, P)
    grant = Grant(0, until(lambda: decode.lend(P, range(PAGES)), decode, prefill), tuple(range(PAGES)))
    engine = prefill._engines["tcp"]
    write = engine.write

    def raises(*arguments: Any) -> None:
        write(*arguments)
        raise OSError("no buffer space")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "write", raises)
        with pytest.raises(OSError, match="no buffer space"):
            prefill.write(peer, [0], [0], grant)
    post = prefill.write(peer, [1], [1], grant)
    ended: list[tuple[Any, Outcome]] = []
    until(lambda: ended.extend(prefill.poll()) or ended, decode, prefill)
    assert ended == [(post, Outcome.PLACED)]


def test_what_is_claimed_before_a_peer_is_known() -> None:
    both = merged([SHM, TCP])
    assert (both.name, both.lane) == ("auto", "shm tcp")
    assert both.fence == "page", "asked for as narrowly as one of them can"
    assert both.fence_cost == "disrupts_peer" and both.drain == "per_post"
    assert merged([TCP]) is TCP


def test_a_host_is_its_boot_its_pids_and_its_user() -> None:
    assert this_host().endswith(f"/{os.getuid()}") and this_host().count("/") == 2


# ---------------------------------------------------------------- what is remembered, and for how long


def test_an_epoch_that_is_in_use_is_never_forgotten(
    made: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is attached and has a grant; those behind it come and go."""
    monkeypatch.setattr("quiesce.transfer.choice.MAX_BOUND", 3)
    lender, poster = made(D, "tcp"), made(P, "tcp")
    lender.settle(P, poster.reply(D, lender.descriptor(P)))
    poster.connect(lender.descriptor(P), P)
    generation = until(lambda: lender.lend(P, [1, 2]), lender, poster)
    passing = [made(0x100 + number, "tcp") for number in range(5)]
    for other in passing:
        lender.settle(other._epoch, other.reply(D, lender.descriptor(other._epoch)))
    assert set(lender._bound) == {P, passing[3]._epoch, passing[4]._epoch}
    proof = until(lambda: lender.fence(P, generation, frozenset([1, 2])), lender, poster)
    assert proof.peer_epoch == P, "what was lent first can still be proven to be safe"


def test_when_all_that_are_remembered_are_in_use_a_new_peer_is_refused(
    made: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiesce.transfer.choice.MAX_BOUND", 1)
    lender, poster, other = made(D, "tcp"), made(P, "tcp"), made(0xC, "tcp")
    lender.settle(P, poster.reply(D, lender.descriptor(P)))
    peer = poster.connect(lender.descriptor(P), P)
    generation = until(lambda: lender.lend(P, [1]), lender, poster)
    reply = other.reply(D, lender.descriptor(0xC))
    with pytest.raises(ValueError, match="1 peers are in use already"):
        lender.settle(0xC, reply)
    poster.disconnect(peer)
    until(lambda: lender.generation(P) is None, lender, poster)
    with pytest.raises(ValueError, match="1 peers are in use already"):
        lender.settle(0xC, reply)  # its grant is open still
    lender.withdraw(P, generation)
    lender.settle(0xC, reply)
    assert set(lender._bound) == {0xC}


def test_h11_connections_that_never_drained_are_bounded_and_stay_undrained(
    made: Callable[..., Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiesce.transfer.choice.MAX_UNDRAINED", 2)
    poster = made(P, "tcp")
    lenders = [made(0x200 + number, "tcp") for number in range(5)]
    monkeypatch.setattr(TcpTransport, "drain", lambda self, peer: False)
    peers = []
    for lender in lenders:
        poster.reply(lender._epoch, lender.descriptor(P))
        peers.append(poster.connect(lender.descriptor(P), P))
        poster.disconnect(peers[-1])
    assert (len(poster._left), len(poster._peers), len(poster._numbers)) == (2, 2, 2)
    monkeypatch.undo()
    assert [poster.drain(peer) for peer in peers] == [False, False, False, True, True]


def test_picks_name_the_engine_of_each_pair_in_use_and_why(made: Callable[..., Choice]) -> None:
    lender = made(D, "shm", "tcp")
    assert lender.picks() == ()
    posters = [made(0xB0, "shm", "tcp"), made(0xB1, "shm", "tcp"), made(0xB2, "tcp")]
    for poster in posters:
        reply = poster.reply(D, lender.descriptor(poster._epoch))
        lender.settle(poster._epoch, reply)
        poster.connect(lender.descriptor(poster._epoch), poster._epoch)
        until(lambda poster=poster: lender.generation(poster._epoch), lender, *posters)
    assert lender.picks() == ("shm: both are on one host (2 peers)", "tcp: the only one here (1 peer)")
    assert [poster.picks() for poster in posters] == [("shm: both are on one host (1 peer)",)] * 2 + [
        ("tcp: the only one here (1 peer)",)
    ]
