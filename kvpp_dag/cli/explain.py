"""`kvpp-dag explain`: the worst waits of recorded forwards, why they were, and what to try."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpp_dag.trace.explanation import Explanation, Wait
from kvpp_dag.trace.explanation import explain as explain_recordings
from kvpp_dag.trace.overlap import ADVICE
from kvpp_dag.trace.recording import read_recordings

_NUMBERED = re.compile(r"([^0-9]*)[0-9]+([^0-9]*)")


def explain(
    path: Annotated[Path, typer.Argument(help="A recording, or a directory with one per rank.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; times in nanoseconds.")] = False,
) -> None:
    """Say where compute waited for transfers, why, and what to try."""
    explanation = explain_recordings(read_recordings(path))
    if as_json:
        typer.echo(json.dumps(_as_json(explanation), indent=1))
    else:
        _print(explanation)


def _as_json(explanation: Explanation) -> dict[str, Any]:
    return {
        "forwards": explanation.forwards,
        "duration_ns": explanation.duration_ns,
        "transfer_ns": explanation.transfer_ns,
        "exposed_ns": explanation.exposed_ns,
        "bytes": explanation.bytes,
        "needed_bytes": explanation.needed_bytes,
        "free_transfers_ns": explanation.free_transfers_ns,
        "free_compute_ns": explanation.free_compute_ns,
        "worst": [_wait_as_json(wait) for wait in explanation.worst],
        "totals": [
            {"cause": str(cause), "ns": ns, "try": ADVICE[cause]}
            for cause, ns in explanation.totals.items()
        ],
        "advice": explanation.advice,
        "unknown": list(explanation.unknown),
    }


def _wait_as_json(wait: Wait) -> dict[str, Any]:
    layer = wait.layer
    return {
        "stage": wait.stage,
        "rank": wait.rank,
        "forward": wait.forward,
        "layer": layer.layer,
        "name": layer.name,
        "owner": layer.owner,
        "bytes": layer.bytes,
        "needed_bytes": layer.needed_bytes,
        "exposed_ns": layer.exposed_ns,
        "transfer_ns": layer.transfer_ns,
        "causes": [
            {"cause": str(p.cause), "ns": p.ns, "detail": p.detail, "node": p.node} for p in layer.parts
        ],
    }


def _print(explanation: Explanation) -> None:
    console = Console()
    _figures(console, explanation)
    if explanation.worst:
        _waits(console, explanation)
        _causes(console, explanation)
    _say(console, explanation.advice)
    for sentence in explanation.unknown:
        _say(console, f"Not known: {sentence}")


def _figures(console: Console, explanation: Explanation) -> None:
    duration, sent, needed = explanation.duration_ns, explanation.bytes, explanation.needed_bytes
    waited = f", {100 * explanation.exposed_ns / duration:.1f} % of that time" if duration else ""
    of_that = (
        f"; the batches needed {100 * needed / sent:.1f} % of it" if sent and needed is not None else ""
    )
    lines = (
        f"forwards   {explanation.forwards}, {_ms(duration)} ms (added up over all ranks given)",
        f"transfers  {_ms(explanation.transfer_ns)} ms, {sent / 1e6:.3f} MB sent{of_that}",
        f"exposed    {_ms(explanation.exposed_ns)} ms{waited}",
        f"bounds     {_ms(explanation.free_transfers_ns)} ms with free transfers, "
        f"{_ms(explanation.free_compute_ns)} ms with free compute",
    )
    for line in lines:
        _say(console, line)


def _waits(console: Console, explanation: Explanation) -> None:
    stages = len({wait.stage for wait in explanation.worst}) > 1
    head, tail = _around_number({wait.layer.name for wait in explanation.worst})
    title = f"the {len(explanation.worst)} longest waits, in ms"
    if head or tail:
        title += f"; a layer is the * of {head}*{tail}"
    # As `Text`, since a name of a recording may look like markup.
    table = Table(title=Text(title), show_lines=True)
    for column in (*(["stage"] if stages else []), "rank", "forward"):
        table.add_column(column, justify="right")
    table.add_column("layer", overflow="fold")
    table.add_column("exposed", justify="right")
    table.add_column("transfer", justify="right")
    table.add_column("why", ratio=1)
    for wait in explanation.worst:
        layer = wait.layer
        why = "\n".join(
            f"{100 * part.ns / layer.exposed_ns:.0f} % {part.cause}: {part.detail}"
            for part in layer.parts
            if part is layer.parts[0] or 100 * part.ns >= layer.exposed_ns
        )
        numbers = (*([wait.stage] if stages else []), wait.rank, wait.forward)
        table.add_row(
            *map(str, numbers),
            Text(layer.name.removeprefix(head).removesuffix(tail)),
            _ms(layer.exposed_ns),
            _ms(layer.transfer_ns),
            Text(why),
        )
    console.print(table)


def _around_number(names: Iterable[str]) -> tuple[str, str]:
    """What stands before and behind the one number in which all names differ; empty if they differ in more."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    around = {match and (match[1], match[2]) for match in matches}
    return (around.pop() if len(around) == 1 else None) or ("", "")


def _causes(console: Console, explanation: Explanation) -> None:
    table = Table(title="exposed time by cause", show_lines=True)
    table.add_column("cause")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what to try", ratio=1)
    for cause, ns in explanation.totals.items():
        share = f"{100 * ns / explanation.exposed_ns:.0f} %"
        table.add_row(str(cause), _ms(ns), share, ADVICE[cause])
    console.print(table)


def _say(console: Console, sentence: str) -> None:
    console.print(Text(sentence))


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"
