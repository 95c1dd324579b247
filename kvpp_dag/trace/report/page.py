"""One self-contained HTML page from recordings and what the analysis says of them.

The page loads nothing: style, scripts and Plotly are inside it, and its content security policy forbids
every request and every script but these two. Texts from recordings enter it as JSON and are shown as text.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from kvpp_dag import __version__
from kvpp_dag.graph import Graph
from kvpp_dag.trace.overlap import ForwardOverlap
from kvpp_dag.trace.records import Recording
from kvpp_dag.trace.report.data import page_data
from kvpp_dag.trace.svg import to_svg

_SCRIPTS = ("model.js", "charts.js", "tables.js", "page.js")
# JSON knows these characters in strings alone, where they may be written as escapes.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def to_html(recordings: Sequence[Recording], analyses: Sequence[Sequence[ForwardOverlap]]) -> str:
    """The page; `analyses` is what `analyze(recordings)` returned.

    Raises DumpError if a single forward is larger than a page can show.
    """
    data, drawn = page_data(recordings, analyses)
    plotly = get_plotlyjs()
    script = f'"use strict";\n(() => {{\n{"".join(_file(name) for name in _SCRIPTS)}}})();\n'
    return Template(_file("page.html")).substitute(
        policy=_policy(plotly, script),
        css=_file("page.css"),
        version=escape(__version__),
        graphs="\n".join(_template(number, graph) for number, graph in enumerate(drawn)),
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES),
        plotly=plotly,
        script=script,
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _template(number: int, graph: Graph) -> str:
    return f'<template id="shape-{number}">{to_svg(graph)}</template>'


def _policy(*scripts: str) -> str:
    """Nothing from anywhere; scripts by their digest; styles and images that are inside the page."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
