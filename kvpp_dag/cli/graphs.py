"""`kvpp-dag graph` and `kvpp-dag verify`: write a forward's graph, and judge dumps of graphs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvpp_dag.cli.dumps import read_graph
from kvpp_dag.cli.files import write_new
from kvpp_dag.errors import ConfigError
from kvpp_dag.graph import (
    Policy,
    build_forward,
    to_dot,
    to_json,
    to_text,
    verify_group,
)
from kvpp_dag.graph.verify import MAX_FINDINGS
from kvpp_dag.plan import CacheSpec, Component, load_preset, plan_stage, preset_stages


class Format(StrEnum):
    """Forms of a graph."""

    TEXT = "text"
    DOT = "dot"
    JSON = "json"


_FORMS = {Format.TEXT: to_text, Format.DOT: to_dot, Format.JSON: to_json}
_MLA_BYTES_PER_TOKEN = 1152


def graph(
    tp: Annotated[int, typer.Option(help="Ranks of the KVPP group.")],
    rank: Annotated[int, typer.Option(help="The rank whose graph to write.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Layers of a uniform bf16 MLA model.")] = None,
    preset: Annotated[str | None, typer.Option(help="A model instead of --layers.")] = None,
    blocks: Annotated[int, typer.Option(help="Blocks of 16 tokens.")] = 1024,
    policy: Annotated[Policy, typer.Option(help="When the next transfer starts.")] = Policy.ON_ACQUIRE,
    depth: Annotated[int, typer.Option(help="Prefetch depth.")] = 1,
    chunks: Annotated[int, typer.Option(help="Chunks a layer is packed into; 0: sent in place.")] = 0,
    history: Annotated[bool, typer.Option("--history/--no-history", help="Any computed tokens?")] = True,
    form: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.TEXT,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A new file.")] = None,
) -> None:
    """Write the graph of one forward on one rank."""
    if (layers is None) == (preset is None):
        raise ConfigError("Give either --layers or --preset, to say which layers the graph has.")
    if layers is not None and layers < 0:
        raise ConfigError(f"--layers is {layers}; expected 0 or more.")
    specs = preset_stages(load_preset(preset))[0] if preset else _uniform(layers or 0)
    plan = plan_stage(specs, ranks=tp, depth=depth)
    built = build_forward(
        plan,
        rank=rank,
        num_blocks=16 * blocks if preset else blocks,
        history=history,
        policy=policy,
        chunks=chunks,
    )
    text = _FORMS[form](built)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_new(output, text)


def verify(
    files: Annotated[list[Path], typer.Argument(help="JSON or text dumps: one, or one per rank.")],
) -> None:
    """Prove that dumped graphs are free of races and deadlocks.

    Exit status 0: sound. 1: unsound, with a line per finding. 2: a file cannot be read.
    """
    graphs = [read_graph(path) for path in files]
    findings = verify_group(graphs)
    for finding in findings:
        typer.echo(finding.message)
    ranks = ", ".join(str(g.rank) for g in graphs)
    nodes = sum(len(g.nodes) for g in graphs)
    if findings:
        least = "at least " if len(findings) >= MAX_FINDINGS else ""
        typer.echo(f"unsound: {least}{len(findings)} findings in {nodes} nodes of rank {ranks}")
        raise typer.Exit(1)
    typer.echo(f"sound: {nodes} nodes of rank {ranks}, alone and across two consecutive forwards")


def _uniform(layers: int) -> list[CacheSpec]:
    main = Component(name="main", bytes_per_block=_MLA_BYTES_PER_TOKEN * 16)
    return [CacheSpec(layer=f"layers.{i}", index=i, components=(main,)) for i in range(layers)]
