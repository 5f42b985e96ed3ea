"""What a dtype or a quantization costs in quality: perplexity on English prose that Python itself ships.

    python -m bench.perplexity [--tokens 8192] [--model smollm2]

The text is the language reference as `help()` prints it (`pydoc_data.topics`), cut into windows of 1,024 tokens; each
token but a window's first is scored by all before it in the window.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from quiesce.engine.batch import Row
from quiesce.engine.engine import Engine
from quiesce.models.registry import DEFAULT, resolve

WINDOW = 1024
WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, bfloat16 KV": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, bfloat16 KV": {"dtype": "bfloat16", "quantization": "int4"},
    "bfloat16, plain PyTorch": {"dtype": "bfloat16", "native_level": "off"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--only", choices=tuple(WAYS), action="append", help="leave the others out")
    wanted = parser.parse_args()
    folder = resolve(wanted.model)
    ids = _ids(folder, wanted.tokens)
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
    print(f"{len(ids)} tokens of Python's language reference, windows of {WINDOW}, {folder.name}")
    base = 0.0
    for name in wanted.only or WAYS:
        engine = Engine(folder, page_size=16, pool_pages=WINDOW // 16, **WAYS[name])  # type: ignore[arg-type]
        losses = [loss for window in windows for loss in _losses(engine, window)]
        mean = sum(losses) / len(losses)
        base = base or mean
        print(
            f"{name:26} perplexity {math.exp(mean):8.4f}  {100 * math.expm1(mean - base):+.3f} %  ({engine.how})",
            flush=True,
        )


def _ids(folder: Path, count: int) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)[:count]


def _losses(engine: Engine, window: list[int]) -> list[float]:
    row = Row(window, 0, range(WINDOW // 16), history=window, prompt_tokens=len(window), prompt_logprobs=0)
    (result,) = engine.run([row])
    return [-scored.logprob for scored in result.prompt_logprobs]


if __name__ == "__main__":
    main()
