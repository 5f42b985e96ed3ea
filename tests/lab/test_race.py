"""The race on real workers and the real model: the unsafe twin shows it, the product does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiesce.lab.race.picture import write_picture
from quiesce.lab.race.play import SCENES, play
from quiesce.models.registry import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


ENGINES = ("shm", "tcp", "nixl/tcp", "mooncake/tcp")
IN_EVERY_RUN = ("two-donors", "refused")  # tests/cluster/test_pull_check.py has the late read, on a tiny model


@pytest.mark.parametrize(
    ("scene", "transfer"),
    [
        pytest.param(scene, transfer, marks=[] if scene in IN_EVERY_RUN and transfer == "shm" else [pytest.mark.long])
        for scene in SCENES
        for transfer in ENGINES
    ],
)
def test_unsafe_shows_the_fault_and_safe_does_not(scene: str, transfer: str, tmp_path: Path) -> None:
    if transfer.startswith(("nixl", "mooncake")):
        pytest.importorskip("nixl_cu12" if transfer.startswith("nixl") else "mooncake.engine", exc_type=ImportError)
    done = play(resolve("smollm2"), SCENES[scene], transfer, unsafe=1, safe=1, told=lambda run: None)

    assert done.safe[0].clean, done.safe[0].said
    if done.cannot:
        assert scene == "restart" and transfer != "tcp" and not done.unsafe
        return
    assert done.unsafe[0].shown, done.unsafe[0].said
    assert "Page timeline" in write_picture(done.unsafe + done.safe, tmp_path / scene).read_text("utf-8")
    if scene == "two-donors":
        answer, baseline = done.unsafe[0].answer, done.unsafe[0].baseline
        assert answer.startswith("1, 2, 3, 4, 5, 6, 7, 8, 9, 1") and "swordfish" in answer
        assert "swordfish" not in baseline
