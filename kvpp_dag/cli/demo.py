"""`kvpp-dag demo`: the main job once, on real vLLM, with a control and a verdict."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpp_dag.cli.files import check_new, write_new

if TYPE_CHECKING:
    from kvpp_vllm.demo.run import DemoResult, Run


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Directory for model, logs, dumps and traces [a temporary one].")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="A new file for the figures.")] = None,
) -> None:
    """Serve a small MLA model with KVPP off, on, and on without broadcasts, and compare.

    Exit status 0 only if KVPP changed no token and skipping its broadcasts changed some.
    """
    from kvpp_vllm.demo.run import run_demo  # noqa: PLC0415 - the other commands need no engine

    if json_file is not None:
        check_new(json_file)
    directory = out if out is not None else Path(tempfile.mkdtemp(prefix="kvpp-demo-"))
    console = Console()
    with console.status("starting") as status:

        def progress(run: str, phase: str) -> None:
            status.update(f"{run}: {phase}")
            console.print(f"  {run:<10} {phase}", highlight=False)

        result = run_demo(directory, progress)
    _print(console, result)
    figures = result.as_json()
    if json_file is not None:
        write_new(json_file, json.dumps(figures, indent=1) + "\n")
    console.print(f"files: {directory}", highlight=False, soft_wrap=True)
    if not (result.identical and result.control_differs):
        raise typer.Exit(1)


def _print(console: Console, result: "DemoResult") -> None:
    figures = result.as_json()
    table = Table(title=result.setting)
    table.add_column("run")
    table.add_column("blocks", justify="right")
    table.add_column("KV bytes/rank", justify="right")
    table.add_column("same tokens as off")
    table.add_column("seconds", justify="right")
    rows = (
        ("KVPP off", result.off, figures["kv_bytes_per_rank_off"]),
        ("KVPP on", result.on, figures["kv_bytes_per_rank_on"]),
        ("no broadcasts", result.control, max(s["kv_bytes"] for s in result.control.stats)),
    )
    for name, run, nbytes in rows:
        table.add_row(
            name, str(run.blocks), f"{nbytes:,}", _matching(run, result.off), f"{run.seconds:.0f}"
        )
    console.print(table)
    multiplier = figures["capacity_multiplier"]
    console.print(
        f"capacity: {multiplier['measured']:.3f} x measured, {multiplier['predicted']:.3f} x planned; "
        f"{figures['forwards_with_history']} forwards with history sent {figures['broadcasts']} "
        f"broadcasts, {figures['bytes_broadcast']:,} bytes",
        highlight=False,
        soft_wrap=True,
    )
    console.print(result.on.stats[0]["summary"].rstrip(), highlight=False)
    same = "KVPP changed no token" if result.identical else "KVPP CHANGED TOKENS"
    control = (
        "without its broadcasts tokens change"
        if result.control_differs
        else "THE CONTROL CHANGED NOTHING, so this shows nothing"
    )
    console.print(f"verdict: {same}; {control}.", highlight=False)


def _matching(run: "Run", reference: "Run") -> str:
    same = sum(a == b for a, b in zip(run.tokens, reference.tokens, strict=True))
    return f"{same} of {len(reference.tokens)} requests"
