"""The picture of a race: decode's pages on one axis, time on the other, as SVG and as a page of its own.

Made for somebody who has never heard of the fault: the upper panel is what goes wrong, the lower one what the
ledger does instead, and below each stands what the victim's client read.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from quiesce.lab.race.history import Band, History, Write, history
from quiesce.lab.race.stage import SECRET, Run
from quiesce.roles.ownership import runs_of

WIDTH, LEFT, RIGHT = 1000, 70, 24  # px
ROWS = 260  # px of all pages of one panel
HEAD, FOOT, GAP = 118, 96, 26  # px above and below a panel's rows, and between panels
LEGEND = 84
LABEL_LINES = 4
LACKS = {  # what the unsafe half of a scene is without
    "refused": "A refused prompt goes through the hand-off all the same",
    "restart": "A new process takes its predecessor's address and secret over",
    "tainted": "A failed call is taken for the end of its write",
    "reuse": "An ack is believed for whoever has the room now",
    "late-read": "A's lease ends by the clock, and nobody asks after reading",
}
BEFORE = 0.25  # how much is seen of what was before the first write, of all that is seen after it
SHOWN = 104  # characters of an answer

INK = {
    "light": {"ink": "#1c2330", "soft": "#667085", "paper": "#ffffff", "grid": "#e4e7ec", "bad": "#d92d20",
              "good": "#1a7f37", "A": "#3b73c4", "B": "#1f9d7a", "C": "#8a5cc2"},
    "dark": {"ink": "#e6e9ef", "soft": "#98a2b3", "paper": "#12161d", "grid": "#2a303b", "bad": "#ff6b5e",
             "good": "#4ac26b", "A": "#6ea1ea", "B": "#3cc49d", "C": "#b48be6"},
}  # fmt: skip
SHAPES = """.q{font-family:system-ui,-apple-system,'Segoe UI',sans-serif}.q text{font-size:13px}
.q .soft{font-size:12px}.q .title{font-size:17px;font-weight:600}.q .moment{stroke-dasharray:3 3}
.q .owned{opacity:.9}.q .lent{opacity:.55}.q .held{opacity:.28}
.q .flight{fill:none;stroke-width:1.6;stroke-dasharray:6 3}
"""


def _colours(theme: str) -> str:
    """Plain rules, no variables: some viewers of SVG know none."""
    ink = INK[theme]
    fills = {"text": "ink", ".paper": "paper", ".soft": "soft", ".other": "soft", ".landed": "ink", ".late": "bad"}
    fills |= {f".{name}": name for name in ("bad", "good", "A", "B", "C")}
    strokes = {".grid": "grid", ".moment": "soft", ".flight": "ink"}
    rules = [f".q {kind}{{fill:{ink[name]}}}" for kind, name in fills.items()]
    return "".join(rules + [f".q {kind}{{stroke:{ink[name]}}}" for kind, name in strokes.items()])


STYLE = f"{SHAPES}{_colours('light')}\n@media (prefers-color-scheme:dark){{{_colours('dark')}}}"


def write_picture(runs: Sequence[Run], stem: Path) -> Path:
    """Writes `stem`.svg and `stem`.html and returns the latter."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    drawn = svg(runs)
    stem.with_suffix(".svg").write_text(drawn, "utf-8")
    page = stem.with_suffix(".html")
    page.write_text(_page(runs, drawn), "utf-8")
    return page.resolve()


def svg(runs: Sequence[Run]) -> str:
    panel = HEAD + ROWS + FOOT
    height = len(runs) * (panel + GAP) + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="q" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Page timeline">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
    ]
    for number, run in enumerate(runs):
        parts += _Panel(run, number * (panel + GAP)).draw()
    parts += _legend(height - LEGEND + 20)
    return "\n".join([*parts, "</svg>\n"])


class _Panel:
    def __init__(self, run: Run, top: float) -> None:
        self.run = run
        self.history: History = history(run.notes, run.began, run.ended)
        self.top = top
        self.rows_top = top + HEAD
        numbers = [n for band in self.history.bands for n in (band.first, band.last)]
        self.first, self.last = min(numbers, default=0), max(numbers, default=0)
        last = max((s.end for band in self.history.bands for s in band.stretches), default=run.ended)
        start = min((s.start for band in self.history.bands for s in band.stretches), default=run.began)
        posted = next((write.posted for write in self.history.writes), start)
        start = max(start, posted - BEFORE * (last - posted))
        margin = 0.04 * (last - start)
        self.start, self.end = start - margin, last + margin

    def x(self, at: float) -> float:
        return LEFT + (at - self.start) / (self.end - self.start) * (WIDTH - LEFT - RIGHT)

    def y(self, page: float) -> float:
        return self.rows_top + (page - self.first) / (self.last - self.first + 1) * ROWS

    def who(self, tid: str) -> str:
        return self.run.labels.get(tid, "")

    def draw(self) -> list[str]:
        return [
            *self._heading(),
            *self._axes(),
            *(shape for band in self.history.bands for shape in self._band(band)),
            *(shape for write in self.history.writes for shape in self._write(write)),
            *self._moments(),
            *self._words(),
        ]

    def _heading(self) -> list[str]:
        run = self.run
        lacks = LACKS.get(run.scene, "Pages freed at once when a request ends")
        title = "With the ledger: pages come back on proof" if run.safe else lacks
        late = any(write.late for write in self.history.writes)
        told = run.headline or (
            "A's write lands in B's pages"
            if late
            else "A's pages are B's while A's write is still under way"
            if run.shown
            else "A's access is revoked, then B gets the pages; A's write comes later and is refused"
            if any(write.refused for write in self.history.writes)
            else "A's write ends while A's pages are still kept for it; then B gets them"
        )
        tone = "bad" if run.shown else "good"
        return [
            _text(LEFT, self.top + 24, title, "title"),
            _text(LEFT, self.top + 44, told, tone),
        ]

    def _axes(self) -> list[str]:
        shapes = [
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            for y in (self.rows_top, self.rows_top + ROWS)
        ]
        shapes.append(_text(LEFT - 8, self.rows_top + 10, f"page {self.first}", "soft", "end"))
        shapes.append(_text(LEFT - 8, self.rows_top + ROWS, str(self.last), "soft", "end"))
        step = _tick(self.end - self.start)
        at = 0.0
        while self.start + at < self.end:
            x = self.x(self.start + at)
            shapes.append(_text(x, self.rows_top + ROWS + 16, f"{at:.3g} s", "soft", "middle"))
            at += step
        return shapes

    def _band(self, band: Band) -> list[str]:
        y, height = self.y(band.first), self.y(band.last + 1) - self.y(band.first)
        inset = 0.5 if height > 3 else 0.0
        shapes = []
        for stretch in band.stretches:
            x = max(float(LEFT), self.x(stretch.start))
            width = self.x(stretch.end) - x
            if width < 0:
                continue  # before what is shown
            state = "held" if stretch.state == "retained" else stretch.state
            shapes.append(
                f'<rect class="{self.who(stretch.tid) or "other"} {state}" x="{x:.1f}" y="{y + inset:.1f}" '
                f'width="{max(width, 0.8):.1f}" height="{height - inset:.1f}"><title>pages {band.first}-{band.last}: '
                f"{stretch.state} by {self.who(stretch.tid)}, {stretch.end - stretch.start:.3f} s</title></rect>"
            )
        return shapes

    def _write(self, write: Write) -> list[str]:
        shapes = []
        until = write.landed if write.landed is not None else self.end
        for first, last in runs_of(write.pages):
            x, y = self.x(write.posted), self.y(first)
            width, height = self.x(until) - x, self.y(last + 1) - y
            shapes.append(f'<rect class="flight" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')
        if write.landed is not None and not write.refused:
            for first, last in runs_of(write.late or write.pages):
                y, height = self.y(first), self.y(last + 1) - self.y(first)
                kind, width = ("late", 9) if write.late else ("landed", 3)
                x = self.x(write.landed) - width / 2
                shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height:.1f}"/>')
        return shapes

    def _moments(self) -> list[str]:
        told: list[tuple[float, str, str]] = []
        for at, tid, what in self.history.moments:
            who = self.who(tid)
            if what == "asked":
                told.append((at, "B asks", ""))
            elif who == "A" and what == "ended":
                told.append((at, "A is cut", ""))
            elif who == "A" and what.startswith("closed"):
                said, tone = ("proof", "good") if self.run.safe else ("believed", "bad")
                told.append((at, f"{said}: {what.split()[1]}", tone))
            elif what.endswith("dead"):
                told.append((at, "decode dies", ""))
            elif who == "B" and what == "owned":
                told.append((at, "B gets pages", ""))
        for write in self.history.writes:
            if write.landed is not None and self.who(write.tid) == "A":
                text = "A's write is refused" if write.refused else "A's write lands"
                told.append((write.landed, text, "bad" if write.late else ""))
        shapes, right = [], [0.0] * LABEL_LINES  # where the last label of each line ended
        for at, text, tone in sorted(told):
            x = self.x(at)
            line = next((n for n, end in enumerate(right) if x > end), right.index(min(right)))
            right[line] = x + 7.2 * len(text) + 14
            y = self.top + 64 + 15 * line
            shapes.append(
                f'<line class="moment" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 3:.1f}" y2="{self.rows_top + ROWS:.1f}"/>'
            )
            shapes.append(_text(x + 3, y, text, tone or "soft"))
        return shapes

    def _words(self) -> list[str]:
        run = self.run
        y = self.rows_top + ROWS + 40
        shapes = [
            _text(LEFT, y, "Asked alone, B's client reads", "soft"),
            _text(LEFT + 190, y, _quote(run.baseline)),
            _text(LEFT, y + 20, "Here it reads", "soft"),
        ]
        answer = _quote(run.answer)
        if run.parts_at is None:
            return [*shapes, _text(LEFT + 190, y + 20, answer, "good"), _text(LEFT, y + 40, "The same.", "soft")]
        same = _same(run.baseline, run.answer)
        left = escape(answer[:same])
        return [
            *shapes,
            f'<text x="{LEFT + 190}" y="{y + 20}">{left}<tspan class="bad">{escape(answer[same:])}</tspan></text>',
            _text(LEFT, y + 40, f"From token {run.parts_at} on it is {_whose(run.answer)} text.", "bad"),
        ]


def _whose(answer: str) -> str:
    return "another tenant's" if SECRET.split()[-1].strip(".") in answer else "another"


def _legend(y: float) -> list[str]:
    entries = [
        ("A owned", "owned by A"),
        ("A lent", "lent: prefill may write into it"),
        ("A held", "held: A has ended, its write has not"),
        ("B owned", "owned by B"),
        ("flight", "a posted write under way"),
        ("late", "lands in another's page"),
    ]
    shapes, x = [], float(LEFT)
    for kind, text in entries:
        width = 36 + 6.9 * len(text)
        if x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + 22
        shapes.append(f'<rect class="{kind}" x="{x:.0f}" y="{y - 11:.0f}" width="16" height="13"/>')
        shapes.append(_text(x + 22, y, text, "soft"))
        x += width
    return shapes


def _page(runs: Sequence[Run], drawn: str) -> str:
    scene = escape(runs[0].scene) if runs else "race"
    said = "\n".join(f"<li>{'safe' if run.safe else 'unsafe'}: {escape(run.said)}</li>" for run in runs)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>quiesce race {scene}</title>
<style>body{{margin:2rem auto;max-width:1000px;padding:0 1rem;font:15px/1.5 system-ui,sans-serif}}
svg{{width:100%;height:auto;border-radius:8px}}li{{overflow-wrap:anywhere}}</style></head>
<body><h1>The race: {scene}</h1>
<p>Each row is a page of the decode engine's memory, time runs to the right. Request A's prompt is being written into
its pages by another machine. A's client leaves. A write that is under way can't be called back: the question is
whether its pages may be given to request B meanwhile.</p>
{drawn}
<ul>{said}</ul></body></html>
"""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _quote(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 1] + "…"


def _same(left: str, right: str) -> int:
    """Characters that both begin with, as quoted."""
    count = 0
    for a, b in zip(_quote(left), _quote(right), strict=False):
        if a != b:
            break
        count += 1
    return count


def _tick(span: float) -> float:
    return next(step for step in (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1e9) if span / step <= 10)
