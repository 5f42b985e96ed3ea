"""The connections of a reader, while their sources live and after."""

from __future__ import annotations

from typing import Any, cast

import pytest

from quiesce.roles.pull_reading import Sources
from quiesce.transfer.interface import Peer, Transport

SOURCE = 7


class Drains:
    """As far as `Sources` asks a transport: `drained` says what it can prove now."""

    def __init__(self) -> None:
        self.drained: set[Peer] = set()
        self.ended: list[Peer] = []
        self._number = 0

    def connect(self, descriptor: bytes, own_epoch: int) -> Peer:
        self._number += 1
        return Peer(SOURCE, self._number)

    def disconnect(self, peer: Peer) -> None:
        self.ended.append(peer)

    def drain(self, peer: Peer) -> bool:
        return peer in self.drained


def test_a15_a_read_in_doubt_is_drained_after_its_source_has_died() -> None:
    """Found by `quiesce sim`: a read ends UNKNOWN, prefill dies, and the reader has forgotten the connection that it
    would have to ask about: its own pages were retained until it was started again."""
    transport: Any = Drains()
    sources = Sources(cast(Transport, transport), 1)
    assert not sources.drained(SOURCE), "nothing was ever read from it: nothing to say"
    sources.settle(SOURCE, b"")
    peer = sources.peer(SOURCE)
    assert peer is not None
    sources.drop(SOURCE)
    assert transport.ended == [peer] and sources.peer(SOURCE) is None
    assert not sources.drained(SOURCE), "its bytes may still land"
    transport.drained.add(peer)
    assert sources.drained(SOURCE)


def test_a_descriptor_that_leads_to_another_process_is_refused() -> None:
    """Reads are fenced by whom they are from: a fence of `SOURCE` would have proven nothing about these."""
    transport: Any = Drains()
    sources = Sources(cast(Transport, transport), 1)
    with pytest.raises(ValueError, match="leads to another process"):
        sources.settle(SOURCE + 1, b"")
    assert len(transport.ended) == 1 and sources.peer(SOURCE + 1) is None
