"""The way of the answer that frees pages: a scratch hand-off is given up half way, and DRAINED has to come back.

Two threads stand for a decode and a prefill worker: the machines, the messages and the transport are those that
serve; between them is a socket. The side whose pages are lent ends the request while the other one posts.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quiesce.ops.doctor_ack_sides import DECODE, PREFILL, Lending, Posting
from quiesce.ops.doctor_ack_ways import PullDecode, PullPrefill, PushDecode, PushPrefill
from quiesce.roles.settings import Direction
from quiesce.transfer.interface import Transport

SECONDS = 10.0

Make = Callable[[int], Transport]


@dataclass(frozen=True)
class Told:
    """`closed_by`: the proof that closed the lease, empty: none did. `posts`: made by the borrower.
    `milliseconds`: from ABORT to the pages' return. `trouble`: what went wrong besides."""

    closed_by: str
    posts: int
    milliseconds: float
    answers: tuple[str, ...]
    trouble: str = ""

    @property
    def drained(self) -> bool:
        return self.closed_by == "drained" and self.posts > 0 and not self.trouble


def abort(make: Make, direction: Direction = "push", seconds: float = SECONDS) -> Told:
    """`make(epoch)` gives a transport of its own. Raises what `make` raises."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lending: Lending
    posting: Posting
    patience = 2 * seconds  # of the borrower: the lender gives up first, and hangs up
    if direction == "push":
        lending, posting = PushDecode(make(DECODE), ours, seconds), PushPrefill(make(PREFILL), theirs, patience)
    else:
        lending, posting = PullPrefill(make(PREFILL), ours, seconds), PullDecode(make(DECODE), theirs, patience)
    failed: list[BaseException] = []
    thread = threading.Thread(target=_played, args=(posting, failed), name="doctor-borrower")
    thread.start()
    took, trouble = 0.0, ""
    try:
        took = lending.play()
    except TimeoutError:
        trouble = f"no proof within {seconds:g} s"
    except (OSError, ValueError) as error:
        trouble = str(error)
    finally:
        ours.close()
        thread.join(patience + 1)
        theirs.close()
        for side in (posting, lending):
            side.close()
    if failed:
        trouble = f"{type(failed[0]).__name__}: {failed[0]}"
    if not trouble and (left := lending.ledger.not_idle()):
        trouble = f"not returned: {left[0]}"
    closed = [kind for kind, count in lending.ledger.closed_by.items() if count]
    return Told(closed[0] if closed else "", posting.posts, took * 1000, tuple(lending.answers), trouble)


def _played(side: Posting, failed: list[BaseException]) -> None:
    try:
        side.play()
    except Exception as error:  # of a thread: told to whoever joins it
        failed.append(error)
    finally:
        side.wire.close()
