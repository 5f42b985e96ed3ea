"""Who is measured: which Python runs each engine, on which form of the weights, with which settings.

Peers live in environments of their own under build/peers, made by `make bench-peers`; who is not there is left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = (ROOT / "build" / "peers").resolve()  # one place, however it is reached: compiled code is found by path
VLLM, LLAMA = PEERS / "vllm" / "bin" / "python", PEERS / "llama" / "bin" / "python"
GGUF = {"bfloat16": PEERS / "smollm2-bf16.gguf", "Q4_1": PEERS / "smollm2-Q4_1.gguf"}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
BFLOAT16_NEEDS = (
    "avx512f"  # the CPU flag that vLLM's products of bfloat16 need (oneDNN's); else plain torch does them
)
FLOAT32_TOO = """\
vllm: this CPU has no AVX-512, so oneDNN does not multiply bfloat16 for vLLM, and plain torch does, slowly.
vllm float32 is the same weights and values in float32, which oneDNN does multiply here: twice the bytes, several
times the rate. Where batches are large it is vLLM at its best on this machine, and the stricter comparison."""
# In one process, so that its core and its scheduler do not take turns on the core; 2 GiB hold 64 contexts.
VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),  # what it has compiled: minutes, once
    # Its other cache, of whole functions, does not load again on a CPU (0.32.0): it would compile at each start.
    "VLLM_USE_AOT_COMPILE": "0",
}


@dataclass(frozen=True)
class Peer:
    name: str
    module: str
    python: Path = Path(sys.executable)
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    weights: str = ""  # a GGUF; otherwise the model's own folder
    dtype: str = ""  # where it is not the run's
    lacking: str = ""  # takes part only where the CPU lacks this flag

    def lacks(self, flags: list[str]) -> bool:
        """Whether it has no part on a CPU of these flags: another peer is the same engine at its best."""
        return bool(self.lacking) and self.lacking in flags

    @property
    def installed(self) -> bool:
        return self.python.exists() and all(GGUF[kind].exists() for kind in [self.weights] if kind)


ALL = {
    peer.name: peer
    for peer in (
        Peer("quiesce", "bench.peers.quiesce_engine"),
        Peer("quiesce int8", "bench.peers.quiesce_engine", options=("quantization=int8",)),
        Peer("quiesce int4", "bench.peers.quiesce_engine", options=("quantization=int4",)),
        Peer("vllm", "bench.peers.vllm_llm", VLLM, VLLM_ENV),
        Peer("vllm float32", "bench.peers.vllm_llm", VLLM, VLLM_ENV, dtype="float32", lacking=BFLOAT16_NEEDS),
        Peer("llama.cpp", "bench.peers.llama_cpp_context", LLAMA, weights="bfloat16"),
        Peer("llama.cpp Q4_1", "bench.peers.llama_cpp_context", LLAMA, weights="Q4_1"),
        Peer("transformers", "bench.peers.transformers_model"),
    )
}
