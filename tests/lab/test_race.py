"""The race on real workers and the real model: the unsafe twin shows it, the product does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiesce.lab.race.picture import write_picture
from quiesce.lab.race.play import SCENES, play
from quiesce.models.registry import resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_unsafe_shows_the_fault_and_safe_does_not(scene: str, tmp_path: Path) -> None:
    done = play(resolve("smollm2"), SCENES[scene], "shm", unsafe=1, safe=1, told=lambda run: None)

    assert done.unsafe[0].shown, done.unsafe[0].said
    assert done.safe[0].clean, done.safe[0].said
    assert "Page timeline" in write_picture(done.unsafe + done.safe, tmp_path / scene).read_text("utf-8")
    if scene == "two-donors":
        answer, baseline = done.unsafe[0].answer, done.unsafe[0].baseline
        assert answer.startswith("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1") and "swordfish" in answer
        assert "swordfish" not in baseline
