"""Who is measured: which Python runs each engine, on which form of the weights, with which settings.

Peers live in environments of their own under build/peers, made by `make bench-peers`; who is not there is left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build" / "peers"
VLLM, LLAMA = PEERS / "vllm" / "bin" / "python", PEERS / "llama" / "bin" / "python"
GGUF = {"bfloat16": PEERS / "smollm2-bf16.gguf", "Q4_1": PEERS / "smollm2-Q4_1.gguf"}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
# In one process, so that its core and its scheduler do not take turns on the core; 2 GiB hold 64 contexts.
VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Peer:
    name: str
    module: str
    python: Path = Path(sys.executable)
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    weights: str = ""  # a GGUF; otherwise the model's own folder

    @property
    def installed(self) -> bool:
        return self.python.exists() and all(GGUF[kind].exists() for kind in [self.weights] if kind)


ALL = {
    peer.name: peer
    for peer in (
        Peer("quiesce", "bench.peers.quiesce_engine"),
        Peer("quiesce int8", "bench.peers.quiesce_engine", options=("quantization=int8",)),
        Peer("vllm", "bench.peers.vllm_llm", VLLM, VLLM_ENV),
        Peer("llama.cpp", "bench.peers.llama_cpp_context", LLAMA, weights="bfloat16"),
        Peer("llama.cpp Q4_1", "bench.peers.llama_cpp_context", LLAMA, weights="Q4_1"),
        Peer("transformers", "bench.peers.transformers_model"),
    )
}
