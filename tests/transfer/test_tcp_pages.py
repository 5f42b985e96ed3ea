"""What tcp hands to the kernel: the right bytes in the right order, wherever a system call stops, and no others."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pytest

from quiesce.transfer.tcp_pages import FEW, RUNS, Pool, only

PAGES, SIZE = 600, 1111
HEAD = b"what comes first"


def pool(seed: int) -> tuple[Pool, np.ndarray]:
    pages = np.random.default_rng(seed).integers(0, 256, (PAGES, SIZE), np.uint8)
    return Pool(pages), pages


def test_more_pages_than_one_call_takes_arrive_in_order_through_a_narrow_socket() -> None:
    draw = random.Random(5)
    (source, theirs), (target, ours) = pool(1), pool(2)
    before = ours.copy()
    own, there = draw.sample(range(PAGES), 2 * RUNS), draw.sample(range(PAGES), 2 * RUNS)
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # every call stops somewhere inside a page
    out = source.pieces(own, HEAD)
    calls = []

    def send() -> None:
        while out.left:
            calls.append(out.send(near, socket.MSG_NOSIGNAL))

    sender = threading.Thread(target=send)
    sender.start()
    assert far.recv(len(HEAD), socket.MSG_WAITALL) == HEAD
    into = target.pieces(there)
    while into.left:
        assert into.receive(far, 0) > 0
    sender.join(30)
    assert sum(calls) == len(HEAD) + 2 * RUNS * SIZE
    expected = before
    expected[there] = theirs[own]
    assert np.array_equal(ours, expected), "a byte lies elsewhere"
    near.close()
    far.close()


@pytest.mark.parametrize("own", [[5], [3, 4, 5, 599, 0, 3]])
@pytest.mark.parametrize("head", [b"", HEAD])
def test_what_python_moves_by_itself_is_the_same(head: bytes, own: list[int]) -> None:
    draw = random.Random(7)
    source, pages = pool(3)
    out, moved = source.pieces(own, head), b""
    while out.left:
        front = out.front()
        count = draw.randint(0, len(front))
        moved += bytes(front[:count])
        out.advance(count)
    assert moved == head + pages[own].tobytes()


@pytest.mark.parametrize("page", [-1, PAGES, 2**40])
@pytest.mark.parametrize("others", [[], [1] * FEW])
def test_an_address_outside_the_pool_is_never_made(page: int, others: list[int]) -> None:
    with pytest.raises(IndexError, match="outside"):
        pool(4)[0].pieces([*others, page])


def test_a_head_may_be_all() -> None:
    near, far = socket.socketpair()
    alone = only(HEAD)
    assert alone.send(near, 0) == len(HEAD) and not alone.left
    assert far.recv(100) == HEAD
    near.close()
    far.close()
    with pytest.raises(OSError, match="Bad file"):
        only(HEAD).send(near, 0)
