"""The decode step over fixed buffers, as a CUDA graph replays it: a stand-in keeps the work and runs it again into
the same memory. What is checked is all that is ours: sizes, padding, what is copied in, where padding rows write."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.feeding import prompt_of
from quiesce.core.messages import Sampling
from quiesce.core.pages import PagePool
from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.gpu.choice import Choice
from quiesce.engine.gpu.graphs import DecodeGraphs
from quiesce.engine.model import Model

GREEDY = Sampling(max_tokens=1)
SIZES = (1, 2, 4)
PAGE = 4


class StandIn:
    """A graph holds addresses, not arguments: the output stays one tensor, and only the buffers' content changes."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        with torch.inference_mode():
            out = work()
        self.recorded += 1

        def replay() -> None:
            out.copy_(work())

        return out, replay


@pytest.fixture(scope="module")
def engines(tiny: Path) -> Iterator[tuple[Engine, Engine]]:
    """Both with the Triton kernel; the second with graphs of its decode step."""
    made = [
        Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=32, attention="triton", context_length=64)
        for _ in range(2)
    ]
    model = model_of(made[1])
    assert model.paged is not None
    with torch.inference_mode():
        model.record(made[1].kv, model.paged, StandIn(), SIZES)
    yield made[0], made[1]


def model_of(engine: Engine) -> Model:
    model = engine._model
    assert isinstance(model, Model)
    return model


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = model_of(engine).graphs
    assert graphs is not None
    return graphs


def pages_of(row: int) -> list[int]:
    return [row * 6 + at for at in (4, 1, 5, 0, 3, 2)]


def fed(engine: Engine, lengths: list[int]) -> list[list[int]]:
    prompts = [prompt_of(length, seed=length) for length in lengths]
    engine.run([Row(prompt, 0, pages_of(row)) for row, prompt in enumerate(prompts)])
    return prompts


def decoding(prompts: list[list[int]], step: int) -> list[Row]:
    return [Row([7 + step + row], len(p) + step, pages_of(row), GREEDY) for row, p in enumerate(prompts)]


def test_a_replayed_step_computes_what_the_step_computes(engines: tuple[Engine, Engine]) -> None:
    """Batches that shrink and grow, across page borders: nothing of an earlier batch is left in the buffers."""
    plain, graphed = engines
    both = [fed(engine, [5, 11, 2]) for engine in engines]
    for step, count in enumerate((3, 1, 2, 3)):
        for engine in engines:  # rows that sit a step out are written all the same, so that positions stay alike
            rows = decoding(both[0], step)
            engine.run(rows[count:]) if rows[count:] else None
        rows = decoding(both[0], step)[:count]
        (_, want), (_, got) = plain.logits(rows), graphed.logits(rows)
        np.testing.assert_allclose(got, want, atol=2e-5)
    torch.testing.assert_close(graphed.kv.tensor[:32], plain.kv.tensor[:32], atol=1e-5, rtol=0)
    assert graphs_of(graphed).replays > 4


def test_the_next_size_up_is_taken_and_prompts_and_larger_batches_run_as_they_are(
    engines: tuple[Engine, Engine],
) -> None:
    _, graphed = engines
    graphs, model = graphs_of(graphed), model_of(graphed)

    def size(rows: list[Row]) -> int | None:
        return graphs.size_of(model.plan(rows, graphed.kv))

    singles = [Row([7], 0, [page], GREEDY) for page in range(6)]
    assert [size(singles[:count]) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert size([Row([7, 8], 0, [0])]) is None
    assert size([singles[0], Row([7, 8], 0, [1])]) is None
    before = graphs.replays
    assert len(graphed.step(singles[:5])) == 5 and graphs.replays == before


def test_padding_rows_write_the_scratch_page_and_nothing_else(engines: tuple[Engine, Engine]) -> None:
    """Every page that an allocator knows keeps every byte but the slots of the rows that are real."""
    _, graphed = engines
    pool = graphed.kv
    assert pool.scratch == pool.pages and pool.tensor.shape[0] == pool.pages + 1
    graphed.step([Row([9], 0, [page], GREEDY) for page in range(24, 28)])  # where the padding row was somebody's
    with torch.inference_mode():
        pool.tensor.fill_(0.5)
    before = pool.tensor.clone()
    replays = graphs_of(graphed).replays
    graphed.step([Row([9], PAGE + 1, [20, 21], GREEDY), Row([9], 2, [22], GREEDY), Row([9], 1, [23], GREEDY)])
    assert graphs_of(graphed).replays == replays + 1  # three rows in a graph of four
    changed = {(page, slot) for page, _, _, slot, _, _ in (pool.tensor != before).nonzero().tolist()}
    assert changed == {(21, 1), (22, 2), (23, 1), (pool.scratch, 0)}


def test_no_allocator_and_no_row_can_name_the_scratch_page(engines: tuple[Engine, Engine]) -> None:
    _, graphed = engines
    pages = PagePool(graphed.kv.pages)
    owned = pages.take(graphed.kv.pages)
    assert owned is not None and graphed.kv.scratch not in owned and pages.take(1) is None
    with pytest.raises(EngineError, match="names a page outside"):
        graphed.step([Row([7], 0, [graphed.kv.scratch], GREEDY)])


def test_recording_touches_no_page_that_an_allocator_knows(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=8, attention="triton", context_length=16)
    model, stand_in = model_of(engine), StandIn()
    assert model.paged is not None
    with torch.inference_mode():
        engine.kv.tensor.fill_(0.25)
        model.record(engine.kv, model.paged, stand_in, (2,))
    assert stand_in.recorded == 1
    assert bool((engine.kv.tensor[:8] == 0.25).all()) and not bool((engine.kv.tensor[8] == 0.25).all())


def test_graphs_are_refused_over_a_pool_without_a_scratch_page(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=8, native_level="off")
    with pytest.raises(ValueError, match="scratch page"):
        DecodeGraphs(lambda batch: batch.tokens, engine.kv, context_length=16, recorder=StandIn(), sizes=(1,))


def test_a_step_that_cannot_be_recorded_runs_without_graphs_and_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(StandIn):
        def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
            raise RuntimeError("operation not permitted when stream is capturing")

    engine = Engine(tiny, dtype="float32", page_size=PAGE, pool_pages=8, attention="triton", context_length=16)
    model = model_of(engine)
    assert model.paged is not None
    monkeypatch.setattr("quiesce.engine.engine.CudaRecorder", lambda _: Refusing())
    how = engine._graphs(Choice(model.paged, model.paged, ""), True)
    assert how.startswith("no CUDA graphs: recording failed: RuntimeError: operation not permitted")
    assert "without CUDA graphs" in caplog.text and model.graphs is None
    assert engine.step([Row([7], 0, [0], GREEDY)])[0] is not None
    assert engine._graphs(Choice(model.paged, model.paged, ""), False) == "no CUDA graphs: not wanted"
    assert engine._graphs(Choice(model.paged, None, ""), True).startswith("no CUDA graphs: none can hold Triton")
