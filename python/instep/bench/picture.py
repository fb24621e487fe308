"""Draws the times as an SVG picture. It has a row per candidate, a column per case, and bars with units.

Each format of each case has its own axis, from 0 to the slowest candidate. A thin line across a bar's end shows the
range of the samples.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from .report import MIB, Line, Results

NAMES, COLUMN, BAR, ROW, TOP = 210, 290, 140, 24, 104
OURS, OTHERS = "#2f6db3", "#b6c2cf"
STYLE = (
    "text{font:13px Helvetica,Arial,sans-serif;fill:#24292f}.end{text-anchor:end}.title{font-size:16px;font-weight:bold}"
    ".small{font-size:11px;fill:#57606a}.bold{font-weight:bold}.range{stroke:#24292f;stroke-width:1.5}"
)


def draw(machine: str, versions: str, all_results: list[Results]) -> str:
    """Returns the text of an SVG file."""
    width = NAMES + COLUMN * len(all_results) + 10
    body: list[str] = []

    def say(x: float, y: float, text: str, kind: str = "") -> None:
        body.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>')

    say(10, 26, f"One AdamW step on {machine}", "title")
    say(10, 46, versions, "small")
    said = "Median ms per step, and time / instep's in the same round; less is better. A line is the range."
    say(10, 62, f"{said} Each group of bars has its own axis from 0.", "small")
    for column, results in enumerate(all_results):
        size = f"{results.case.tensors} tensors, {4 * results.case.elements / MIB:g} MiB of gradients in f32"
        say(NAMES + COLUMN * column, 84, results.case.name, "bold")
        say(NAMES + COLUMN * column, 98, size, "small")
    y = TOP
    for format in all_results[0].formats:
        y += ROW
        say(10, y, format, "bold")
        rows = [[line for line in results.lines if line.candidate.format == format] for results in all_results]
        scales = [max((line.spread.high for line in lines if line.times), default=1.0) for lines in rows]
        for lines in zip(*rows):
            y += ROW
            say(NAMES - 12, y, lines[0].candidate.name, "end")
            for column, (line, scale) in enumerate(zip(lines, scales)):
                body.extend(_bar(line, BAR / scale, NAMES + COLUMN * column, y))
    height = y + ROW
    size = f'width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">',
            f'<style>{STYLE}</style>\n<rect {size} fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _bar(line: Line, per_ms: float, x: float, y: float) -> list[str]:
    if line.to_ours is None:
        said = escape((line.missing or "").split(":")[0])
        return [f'<text x="{x}" y="{y}" class="small">{said}</text>']
    spread, colour = line.spread, OURS if line.candidate.is_ours else OTHERS
    label = f"{spread.median:.2f} ms" + ("" if line.candidate.is_ours else f" ({line.to_ours.median:.2f}x)")
    low, high = x + spread.low * per_ms, x + spread.high * per_ms
    middle = y - 4.5
    return [
        f'<rect x="{x}" y="{y - 13}" width="{spread.median * per_ms:.1f}" height="17" fill="{colour}">'
        f"<title>{escape(line.candidate.name)}: {spread.show(3)} ms</title></rect>",
        f'<line class="range" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>',
        f'<text x="{x + BAR + 6:.1f}" y="{y}">{label}</text>',
    ]
