"""What threads tell a transport's owner, to its very end."""

from __future__ import annotations

import os
import threading

import pytest

from quiesce.transfer.inbox import Inbox
from quiesce.transfer.watch import Watch


def test_a_put_during_the_close_never_writes_into_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner may hear what was put, and close, before the one who put it has raised the flag: the flag's number
    is then another file's."""
    watch = Watch()
    inbox = Inbox(watch)
    raising, go_on, written = threading.Event(), threading.Event(), []
    write = os.eventfd_write

    def slow(fd: int, value: int) -> None:
        if fd != inbox._event:
            return write(fd, value)
        raising.set()
        go_on.wait(10)
        os.fstat(fd)  # raises when it was closed meanwhile
        written.append(fd)

    monkeypatch.setattr(os, "eventfd_write", slow)
    putting = threading.Thread(target=inbox.put, args=(lambda: None,))
    putting.start()
    assert raising.wait(10)
    closing = threading.Thread(target=inbox.close)
    closing.start()
    closing.join(0.2)
    go_on.set()
    putting.join(10)
    closing.join(10)
    assert written, "the flag was closed under the one who raised it"
    inbox.put(lambda: None)
    assert len(written) == 1
    watch.close()
