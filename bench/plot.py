"""The results as one picture (needs matplotlib: pip install 'quiesce[plot]')."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Compared, Spread

COLOURS = {
    "quiesce": "#1b6ca8",
    "quiesce int8": "#6aa9d8",
    "quiesce int4": "#9cc9e8",
    "vllm": "#e08e45",
    "vllm float32": "#f0c49a",
    "llama.cpp": "#6b8f3c",
    "llama.cpp Q4_1": "#a9c47f",
    "transformers": "#9a9a9a",
    "Quiesce PD": "#1b6ca8",
    "Quiesce colocated": "#6aa9d8",
    "vLLM PD": "#e08e45",
    "vLLM PD float32": "#f0c49a",
}


def draw(compared: Sequence[Compared], serving: dict[str, dict[str, dict[str, Spread]]], path: Path) -> bool:
    """Write `path`, an SVG. False where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        return False
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "quiesce"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    panels = [name for name in ("decode", "prefill", "requests") if any(name in one.case for one in compared)]
    wide = len(panels) + (3 if serving else 0)
    if not wide:
        return False
    figure, axes = plt.subplots(1, wide, figsize=(4.2 * wide, 3.8), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], panels, strict=False):
        _bars(axis, [one for one in compared if name in one.case], f"{name}: tokens/s on one core")
    if serving:
        for axis, name in zip(axes[0][len(panels) :], ("tokens/s", "TTFT ms", "TPOT ms"), strict=True):
            _lines(axis, serving, name)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return True


def _bars(axis: Any, compared: Sequence[Compared], title: str) -> None:
    seen: set[str] = set()
    at, ticks = 0.0, []
    for one in compared:
        ticks.append((at + (len(one.rates) - 1) / 2, one.case.replace("decode-", "").replace("prefill-", "")))
        for name, rate in one.rates.items():
            reach = [[rate.median - rate.low], [rate.high - rate.median]]
            label = None if name in seen else name
            seen.add(name)
            axis.bar(at, rate.median, 0.9, yerr=reach, capsize=2, color=COLOURS.get(name), label=label)
            at += 1
        at += 1
    axis.set_xticks([x for x, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _lines(axis: Any, serving: dict[str, dict[str, dict[str, Spread]]], name: str) -> None:
    for way, levels in serving.items():
        x = [int(level) for level in levels]
        y = [figures[name] for figures in levels.values()]
        reach = [[one.median - one.low for one in y], [one.high - one.median for one in y]]
        axis.errorbar(x, [one.median for one in y], reach, marker="o", capsize=2, color=COLOURS.get(way), label=way)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(f"{name}, by requests at once (HTTP)", fontsize=10)
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
