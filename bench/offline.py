"""One engine in one process on one core. Answers one JSON line for each JSON line it is sent; idle, it sleeps.

Run by bench.pinned:  python -m bench.offline SUBJECT FOLDER DTYPE CORE
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def serve(subject: str, folder: Path, dtype: str, core: int) -> None:
    os.sched_setaffinity(0, {core})  # before torch looks at how many cores there are
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    from bench.cases import CASES  # noqa: PLC0415
    from bench.limits import measure  # noqa: PLC0415
    from bench.peers import SUBJECTS  # noqa: PLC0415
    from quiesce.engine.config import read_config  # noqa: PLC0415

    cases = {case.name: case for case in CASES}
    begun = time.perf_counter()
    engine = None if subject == "limits" else SUBJECTS[subject](folder, dtype)
    print(json.dumps({"loaded": time.perf_counter() - begun}), file=answers)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if engine is None:
            config = read_config(folder)
            reply = dataclasses.asdict(measure(dtype, config.hidden_size, config.intermediate_size))
        elif request["do"] == "prepare":
            engine.prepare(cases[request["case"]])
            reply = {}
        else:
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = engine.window(cases[request["case"]])
            reply = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}
        print(json.dumps(reply), file=answers)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
