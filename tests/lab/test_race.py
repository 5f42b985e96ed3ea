"""The race on real workers and the real model: the unsafe twin shows it, the product does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiesce.lab.race.picture import write_picture
from quiesce.lab.race.play import SCENES, play
from quiesce.models.registry import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


IN_EVERY_RUN = ("two-donors", "refused", "late-read")
CASES = [(scene, "shm") for scene in SCENES] + [(scene, "tcp") for scene in SCENES if scene != "late-read"]


@pytest.mark.parametrize(
    ("scene", "transfer"),
    [
        pytest.param(
            scene, transfer, marks=[] if (scene in IN_EVERY_RUN and transfer == "shm") else [pytest.mark.long]
        )
        for scene, transfer in CASES
    ],
)
def test_unsafe_shows_the_fault_and_safe_does_not(scene: str, transfer: str, tmp_path: Path) -> None:
    done = play(resolve("smollm2"), SCENES[scene], transfer, unsafe=1, safe=1, told=lambda run: None)

    assert done.unsafe[0].shown, done.unsafe[0].said
    assert done.safe[0].clean, done.safe[0].said
    assert "Page timeline" in write_picture(done.unsafe + done.safe, tmp_path / scene).read_text("utf-8")
    if scene == "two-donors":
        answer, baseline = done.unsafe[0].answer, done.unsafe[0].baseline
        assert answer.startswith("1, 2, 3, 4, 5, 6, 7, 8, 9, 1") and "swordfish" in answer
        assert "swordfish" not in baseline
