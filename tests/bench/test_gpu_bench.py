"""The GPU bench on a machine without one: the whole of it once on a tiny model, and what it does when it is wrong."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))

from bench import gpu
from quiesce.engine.gpu import choice
from quiesce.engine.gpu.paged import TorchAttention
from quiesce.engine.gpu.segments import Segment
from tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_tiny_llama(tmp_path_factory.mktemp("gpu") / "tiny", layers=1)
    return ["--dry-run", "--device=cpu", f"--model={model}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.main(["--device=cpu"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("bench-gpu needs a CUDA device") for line in said)


def test_a_dry_run_checks_and_measures_everything_once(dry: list[str], tmp_path: Path) -> None:
    assert gpu.main([*dry, f"--json={tmp_path / 'found.json'}"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert not [check for check in found["checks"] if check["right"] is False]
    right = {check["what"].partition(",")[0] for check in found["checks"] if check["right"]}
    assert right == {"attention by triton", "attention by torch", "logits", "greedy tokens", "hand-off over mirrors"}
    figures = {figure["what"].partition(": ")[2] for figure in found["figures"]}
    decode = {f"triton, decode of {n} at 20, {way}" for n in (1, 2) for way in ("graph", "kernel by kernel")}
    assert decode | {"triton, prompt of 17", "torch, prompt of 17"} <= figures
    assert all(figure["milliseconds"] > 0 for figure in found["figures"])
    assert found["left_out"] == ["a small shape, flashinfer: it runs on CUDA, not on cpu"]


class Off(TorchAttention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment: Segment) -> torch.Tensor:
        return super().attend(q, k, v, segment) * 1.5


def test_what_is_wrong_ends_it_before_anything_is_measured(
    dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(choice.MAKE, "torch", lambda *_: Off())
    assert gpu.main([*dry, "--backend=torch", f"--json={tmp_path / 'found.json'}"]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert [check["right"] for check in found["checks"]] == [False] * 4 and not found["figures"]
    assert "no attention backend works on cpu: torch is off by" in found["checks"][-1]["found"]
    assert "WRONG, see above: nothing was measured" in capsys.readouterr().out
