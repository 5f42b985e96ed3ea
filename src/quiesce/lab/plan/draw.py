"""The curves of a plan, by matplotlib, as a picture that can be read on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quiesce.lab.plan.case import Course
from quiesce.lab.plan.requests import PlanError

COLOURS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#6c6c6c", "#b8860b")  # told apart by most eyes
KINDS = (".png", ".svg")


def check_targets(paths: list[Path]) -> None:
    """Raises PlanError before anything is computed: a picture that cannot be drawn."""
    for path in paths:
        if path.suffix not in KINDS:
            raise PlanError(f"--plot draws {' or '.join(KINDS)}, not {path.name!r}")
        if not path.parent.is_dir():
            raise PlanError(f"there is no folder {path.parent} to draw {path.name} into")
    if paths:
        _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        raise PlanError("--plot needs matplotlib, which is not installed: pip install 'quiesce[plot]'") from None
    matplotlib.use("Agg")
    # Text stays text and ids do not change, so that a picture can be compared with the one before.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "quiesce", "font.size": 9, "lines.linewidth": 1.3}
    )
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot


def draw(courses: list[Course], title: str, paths: list[Path]) -> None:
    """Held pages, requests that wait, and what holds add to the wait for admission, one line a case."""
    pyplot = _matplotlib()
    figure, (held, waiting, delay) = pyplot.subplots(3, 1, figsize=(8.6, 9.2), layout="constrained")
    figure.patch.set_facecolor("white")
    figure.suptitle(title, fontsize=10)
    shown = [course for course in courses if course.case.holds]
    for course, colour in zip(shown, COLOURS, strict=False):
        samples, storm = np.array(course.samples), course.case.storm
        if storm is not None:  # before it, all are as the first one is
            samples = samples[np.searchsorted(samples[:, 0], storm[0]) :]
        pool = course.sizes.decodes * course.sizes.decode_pages
        held.plot(samples[:, 0], np.maximum(100 * samples[:, 1] / pool, 1e-4), color=colour, label=course.case.name)
        waiting.plot(samples[:, 0], samples[:, 4], color=colour, label=course.case.name)
        _tail(delay, course, colour, "-")
    for course in courses:
        if not course.case.holds:
            _tail(delay, course, "black", ":" if course.case.storm else "--")
    _name(held, "time (s)", "held pages (% of all decode pages)", "Pages held until proof")
    held.set_yscale("log")
    held.set_ylim(bottom=1e-2)
    _name(waiting, "time (s)", "requests", "Requests that wait for admission at decode")
    _name(delay, "seconds of waiting for admission", "share that waits longer", "Wait for admission")
    delay.set_yscale("log")
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
    pyplot.close(figure)


def _tail(axes: Any, course: Course, colour: str, style: str) -> None:
    """The share of admitted requests that waited longer than x."""
    values = np.sort(course.delay[~np.isnan(course.delay)])
    if not len(values):
        return
    keep = np.unique(len(values) - np.geomspace(1, len(values), 400).astype(int))  # dense where few wait
    share = 1.0 - (keep + 1) / (len(values) + 1)
    axes.plot(values[keep], share, color=colour, linestyle=style, label=course.case.name)


def _name(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7.5)
