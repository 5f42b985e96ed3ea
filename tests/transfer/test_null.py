"""The null transport speaks the whole interface and moves nothing (guard N6)."""

from __future__ import annotations

import select

import numpy as np
import pytest

from quiesce.core.messages import Grant
from quiesce.transfer.interface import Arena, FenceProof, Outcome, Transport
from quiesce.transfer.null import NullTransport


def test_n6_a_probe_goes_through_the_same_interface() -> None:
    lender: Transport = NullTransport(1)
    poster: Transport = NullTransport(2)
    arena = Arena(np.full((4, 8), 7, np.uint8))
    region = lender.register(arena)
    peer = poster.connect(lender.descriptor(), 2)
    generation = lender.generation(2)
    assert generation is not None and peer.epoch == 1
    assert not select.select([poster], [], [], 0)[0]
    post = poster.write(peer, [0, 1], [2, 3], Grant(region.id, generation, (2, 3)))
    assert select.select([poster], [], [], 0)[0]
    assert poster.poll() == [(post, Outcome.PLACED)]
    assert poster.poll() == [] and not select.select([poster], [], [], 0)[0]
    assert (arena.pages == 7).all() and poster.drain(peer) and not poster.try_cancel(post)
    assert lender.fence(2) == FenceProof("fenced", 2, generation)
    assert lender.gone(2) == FenceProof("gone", 2, generation)
    poster.disconnect(peer)
    lender.close_all()
    poster.close_all()


@pytest.mark.parametrize("grant", [Grant(0, 2, (0,)), Grant(0, 1, (1,))])
def test_n6_a_wrong_grant_is_refused_as_elsewhere(grant: Grant) -> None:
    poster = NullTransport(2)
    peer = poster.connect(NullTransport(1).descriptor(), 2)
    post = poster.write(peer, [0], [0], grant)
    assert poster.poll() == [(post, Outcome.FAILED_CLEAN)]
    poster.close_all()


def test_another_transport_is_not_mistaken_for_it() -> None:
    with pytest.raises(ValueError, match="null"):
        NullTransport(1).connect(b"\x82\xa4kind\xa3shm\xa5epoch\x01", 1)
