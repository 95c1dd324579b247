"""Draw one recorded forward of both ranks: `python docs/make_trace_picture.py TRACE.json PICTURE.png`.

TRACE.json is the merged trace that `kvpp-dag demo --out DIR` leaves in DIR/trace. Of the recorded forwards with
history, the one whose exposed time is the median is drawn.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLOURS = {"compute": "#9aa7b2", "attend": "#2f6f9f", "broadcast": "#d98032", "wait": "#c0392b"}
HATCHES = {"compute": "", "attend": "", "broadcast": "//", "wait": "xx"}


def main(trace: Path, picture: Path) -> None:
    """Read the trace and write the picture."""
    slices = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    number = median_forward(slices)
    shown = [e for e in slices if e["args"]["forward"] == number and kind(e)]
    start = min(e["ts"] for e in shown)
    rows = {
        (pid, tid): row for row, (pid, tid) in enumerate(sorted({(e["pid"], e["tid"]) for e in shown}))
    }
    figure, axes = plt.subplots(figsize=(12, 3.2), dpi=120)
    for event in shown:
        name = kind(event)
        axes.broken_barh(
            [((event["ts"] - start) / 1000, max(event["dur"], 1) / 1000)],
            (-rows[event["pid"], event["tid"]] - 0.4, 0.8),
            facecolor=COLOURS[name],
            hatch=HATCHES[name],
            edgecolor="white",
            linewidth=0.6,
        )
        if name in ("attend", "broadcast"):
            middle = (event["ts"] - start + event["dur"] / 2) / 1000
            label = str(event["args"]["layer"])
            axes.text(
                middle, -rows[event["pid"], event["tid"]], label, ha="center", va="center", fontsize=7
            )
    streams = {1: "compute", 2: "transfer"}
    axes.set_yticks([-row for row in rows.values()], [f"rank {p}, {streams[t]}" for p, t in rows])
    axes.set_xlabel(f"ms; forward {number} of the demo, layer numbers on its bars")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=COLOURS[k], hatch=HATCHES[k], ec="white") for k in COLOURS]
    axes.legend(handles, COLOURS, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


def kind(event: dict[str, Any]) -> str:
    """What to draw a slice as; empty for the events, which have no width."""
    if event["cat"] == "compute":
        return "attend" if event["name"].startswith("attend") else "compute"
    return event["cat"] if event["cat"] in COLOURS else ""


def median_forward(slices: list[dict[str, Any]]) -> int:
    """The forward with history whose exposed time is the median."""
    exposed: dict[int, float] = defaultdict(float)
    for event in slices:
        if event["cat"] == "wait":
            exposed[event["args"]["forward"]] += event["dur"]
    ranked = sorted(exposed, key=lambda number: (exposed[number], number))
    return ranked[len(ranked) // 2]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
