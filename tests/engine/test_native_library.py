"""Which step runs and what is said of it; and that an installation without a compiler is one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce.engine.engine import Engine
from quiesce.engine.errors import EngineError
from quiesce.engine.native import library
from quiesce.engine.native.library import VARIABLE, choose, levels, supported

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_the_best_level_runs_and_is_named(tiny: Path) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=8)
    assert engine.native
    assert engine.how == f"native {levels()[0]}"


def test_the_environment_decides_where_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "base")
    assert choose("auto", "cpu")[1] == "native base, as asked"
    found, how = choose("off", "cpu")
    assert (found, how) == (None, "plain PyTorch: the native step is off")
    monkeypatch.setenv(VARIABLE, "off")
    assert choose("auto", "cpu") == (None, how)


def test_without_a_library_the_plain_step_runs_and_says_why(tiny: Path, unbuilt: Path) -> None:
    engine = Engine(tiny, dtype="float32", pool_pages=8)
    assert not engine.native
    assert "was not built" in engine.how
    assert "g++" in engine.how
    with pytest.raises(EngineError, match="base was not built; there are: none"):
        Engine(tiny, dtype="float32", pool_pages=8, native_level="base")


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="'sse9' is none of auto, off"):
        choose("sse9", "cpu")
    with pytest.raises(EngineError, match="runs on the CPU, not on cuda"):
        choose("base", "cuda")
    assert choose("auto", "cuda")[0] is None
    monkeypatch.setattr(library, "supported", lambda: ("base",))
    with pytest.raises(EngineError, match="needs what this CPU does not have"):
        choose("avx512", "cpu")


def test_a_file_that_is_no_library_or_a_stale_one_is_refused(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = supported()[0]
    (unbuilt / f"_{best}.so").write_bytes(b"nothing")
    with pytest.raises(EngineError, match="cannot be loaded"):
        choose("auto", "cpu")
    shutil.copy(Path(library.__file__).parent / f"_{best}.so", unbuilt)
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.raises(EngineError, match="another version"):
        choose("auto", "cpu")


def test_quantised_weights_are_another_model(tiny: Path) -> None:
    ways = ("none", "int8", "int4")
    engines = [Engine(tiny, dtype="float32", pool_pages=8, quantization=way) for way in ways]
    assert len({engine.fingerprint.weights for engine in engines}) == len(ways)
    with pytest.raises(EngineError, match="quantization 'int3' is none of none, int8, int4"):
        Engine(tiny, dtype="float32", pool_pages=8, quantization="int3")


@pytest.mark.slow
def test_an_installation_without_a_compiler_goes_on_and_says_so(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    none = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    made = subprocess.run(command, cwd=tmp_path, env=os.environ | none, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "building extension" in made.stderr
    assert not list(tmp_path.glob("src/**/*.so"))
