"""A pool apart from what transports move: what a step wrote is in the mirror once it ends, what landed is read."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.feeding import prompt_of
from quiesce.core.messages import Sampling
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.kv import Staging

GREEDY = Sampling(max_tokens=1)
PAGE = 4


def made(tiny: Path, staging: Staging = "none", attention: str = "torch") -> Engine:
    more = {} if attention == "auto" else {"attention": attention, "staging": staging}
    return Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=32, native_level="off", **more)  # type: ignore[arg-type]


def on_device(engine: Engine, pages: Sequence[int]) -> np.ndarray:
    """The bytes of pages as the engine computes with them."""
    return engine.kv.tensor[list(pages)].contiguous().numpy().view(np.uint8).reshape(len(pages), -1)


def test_what_a_step_wrote_is_in_the_mirror_page_by_page_and_nothing_else(tiny: Path) -> None:
    engine = made(tiny, "source")
    prompt, pages = prompt_of(15), [9, 2, 30, 4]
    engine.run([Row(prompt[:6], 0, pages)])
    first = engine.kv.arena.pages.copy()
    assert first[9].any() and first[2].any() and not np.delete(first, [9, 2], 0).any()
    engine.run([Row(prompt[6:], 6, pages, GREEDY)])
    assert (engine.kv.arena.pages[pages] == on_device(engine, pages)).all()
    assert not np.delete(engine.kv.arena.pages, pages, 0).any()
    assert engine.kv.mirror is not None and engine.kv.mirror.published == 2 + 3


def test_the_mirror_is_what_an_engine_in_host_memory_would_share(tiny: Path) -> None:
    """Workers of both kinds read each other's pages: same numbers, same bytes, same fingerprint."""
    engine, host = made(tiny, "source"), made(tiny, attention="auto")
    for each in (engine, host):
        each.run([Row(prompt_of(13), 0, [3, 1, 2, 0])])
    assert engine.fingerprint == host.fingerprint
    shared = (each.kv.arena.pages.view(np.float32) for each in (engine, host))
    np.testing.assert_allclose(*shared, atol=1e-5)


def test_l1_a_step_has_not_ended_before_the_device_has_written_its_pages(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that does nothing until it is waited for: when `run` returns, all is there."""
    engine = made(tiny, "source")
    mirror, queued = engine.kv.mirror, list[Sequence[int]]()
    assert mirror is not None
    copy = mirror.publish
    monkeypatch.setattr(mirror, "publish", queued.append)

    def finish() -> None:
        while queued:
            copy(queued.pop(0))

    monkeypatch.setattr(engine.kv, "finish", finish)
    engine.run([Row(prompt_of(8), 0, [5, 6])])  # no token is drawn: nothing else waits for the device
    assert (engine.kv.arena.pages[[5, 6]] == on_device(engine, [5, 6])).all() and engine.kv.arena.pages[6].any()
    engine.kv.copy([5, 6], [7, 8])
    assert (engine.kv.arena.pages[[7, 8]] == engine.kv.arena.pages[[5, 6]]).all()


def test_d2_a_step_that_fails_is_over_only_once_the_device_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are given back when it has raised; a kernel that is still under way would write into them."""
    engine = made(tiny)
    said = list[str]()
    monkeypatch.setattr(engine.kv, "finish", lambda: said.append("waited"))

    def fails(*_: object) -> None:
        said.append("launched")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._model, "forward", fails)
    for step in (engine.run, engine.logits):
        with pytest.raises(RuntimeError, match="out of memory"):
            step([Row([7], 0, [0], GREEDY)])
    assert said == ["launched", "waited"] * 2


def test_what_landed_is_read_by_the_first_step_and_what_lands_later_is_not(tiny: Path) -> None:
    source, target, alone = made(tiny, "source"), made(tiny, "target"), made(tiny)
    prompt, pages, theirs = prompt_of(11), [4, 9, 1], [20, 21, 22]
    source.run([Row(prompt, 0, theirs)])
    alone.run([Row(prompt, 0, pages)])
    target.kv.arena.pages[pages] = source.kv.arena.pages[theirs]  # what a transport does

    def logits(engine: Engine, step: int, landed: Sequence[int] = ()) -> np.ndarray:
        return engine.logits([Row([40 + step], 11 + step, pages, GREEDY, landed=landed)])[1]

    want = [logits(alone, step) for step in range(1)]
    assert not np.allclose(logits(target, 0), want[0], atol=1e-3)  # what was not fetched is not there
    np.testing.assert_allclose(logits(target, 0, pages), want[0], atol=1e-5)
    np.testing.assert_allclose(logits(target, 0, pages), want[0], atol=1e-5)  # a step that is repeated
    target.kv.arena.pages[:] = 0xFF  # all NaN: a write that comes too late
    np.testing.assert_allclose(logits(target, 0), want[0], atol=1e-5)
    assert target.kv.mirror is not None and target.kv.mirror.fetched == 6


def test_pages_that_are_not_a_rows_own_are_not_fetched_for_it(tiny: Path) -> None:
    with pytest.raises(EngineError, match="landed pages that are not its own"):
        made(tiny, "target").run([Row([7], 0, [3], landed=[4])])


def test_a_pool_that_nobody_moves_has_no_mirror(tiny: Path) -> None:
    with pytest.raises(EngineError, match="has no mirror"):
        _ = made(tiny).kv.arena
