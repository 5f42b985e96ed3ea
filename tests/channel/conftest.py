from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from channel_bench import Bench

from quiesce.channel import KeyRing, start_authenticator


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    context: zmq.Context[Any] = zmq.Context()
    ring = KeyRing(tmp_path / "ring")
    made = Bench(context, tmp_path, ring)
    ring.add("client", made.client.public)
    authenticator = start_authenticator(context, ring)
    yield made
    for end in made.ends:
        end.close()
    authenticator.stop()
    context.destroy(linger=0)
