"""A public load tool against a running server, as its users run it: `make load` (ARGS="--streams 1,8,32").

The tool knows nothing of us: it finds the model on /v1/models, streams chats with usage, and reports what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from e2e.product import Product
from tiny_model import make_tiny_llama

SIZES = ("--context-length=1024", "--max-total-tokens=65536", "--max-running-requests=64")


def drive(tool: Path, serve: Product, streams: int, requests: int, report: Path) -> dict[str, Any]:
    """Runs it once; its own figures."""
    words = [
        str(tool),
        "run",
        f"--backend=kind=openai_http,target={serve.url}",
        f"--profile=kind=concurrent,streams={streams}",
        f"--constraint=kind=max_requests,count={requests}",
        f"--tokenizer=kind=hf_auto,model={serve.model}",
        "--data=kind=synthetic_text,prompt_tokens=128,output_tokens=32",
        f"--output=kind=json,path={report}",
        "--disable-progress",
    ]
    subprocess.run(words, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    figures: dict[str, Any] = benchmark["metrics"]
    return figures


def answers(serve: Product) -> Counter[str]:
    """How many requests were answered, by status."""
    found: Counter[str] = Counter()
    for name, value in serve.metrics().items():
        if name.startswith("quiesce:http_requests_total") and (status := re.search(r'status="(\d+)"', name)):
            found[status[1]] += int(value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", type=Path)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--streams", default="1,8")
    asked = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder:
        tiny = make_tiny_llama(Path(folder) / "tiny", layers=4, context=1024)
        with Product(tiny, Path(folder), *SIZES, "--dtype=float32") as serve:
            serve.wait()
            for streams in map(int, asked.streams.split(",")):
                before = answers(serve)
                found = drive(asked.tool, serve, streams, asked.requests, Path(folder) / f"{streams}.json")
                ours = answers(serve) - before
                totals = found["request_totals"]
                # It stops by the clock of its own processes, and may leave the last of each stream out of its report.
                told = asked.requests - streams < totals["successful"] <= ours["200"]
                failed += not told or totals["errored"] > 0 or set(ours) != {"200"}
                print(f"{streams} streams: {summary(found)}; we answered {dict(ours)}", flush=True)
            serve.check_idle()
    return 1 if failed else 0


def summary(found: dict[str, Any]) -> str:
    totals = found["request_totals"]
    middle = {
        "time to first token, ms": found["time_to_first_token_ms"]["successful"]["median"],
        "between tokens, ms": found["inter_token_latency_ms"]["successful"]["median"],
        "output tokens/s": found["output_tokens_per_second"]["successful"]["mean"],
    }
    said = ", ".join(f"{name} {value:.1f}" for name, value in middle.items())
    return f"{totals['successful']} of {totals['total']} answered, {totals['errored']} errors; {said}"


if __name__ == "__main__":
    sys.exit(main())
