"""`kvpp-dag plan`: who owns what for a known model, and what it wins."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import (
    ModelPlan,
    Ownership,
    StagePlan,
    capacity_multiplier,
    load_preset,
    plan_model,
    preset_names,
    preset_stages,
)
from kvpp_dag.plan.budget import (
    draft_bytes_per_block,
    logical_bytes_per_block,
    model_blocks,
    owned_bytes_per_block,
    physical_bytes_per_block,
    scratch_bytes_per_block,
    staging_bytes_per_block,
    worst_physical_bytes_per_block,
)

GIB = 1 << 30
Payload = Literal["full", "active", "auto"]
"""The values of `runtime.Payload`, which cannot be had without importing torch."""


def plan(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(preset_names())}.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: ranks of a KVPP group.")],
    pp: Annotated[str | None, typer.Option(help="Layers of each stage, e.g. 38,40.")] = None,
    mtp: Annotated[bool, typer.Option("--mtp/--no-mtp", help="Draft layers on every rank.")] = False,
    depth: Annotated[int, typer.Option(help="Prefetch depth; there is one more scratch slot.")] = 1,
    ownership: Annotated[
        Ownership, typer.Option(help="What the partition balances over the ranks.")
    ] = Ownership.COUNT,
    payload: Annotated[
        Payload,
        typer.Option(
            help="The payload set in vLLM, where auto is the default; any but full has staging halves."
        ),
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show ownership, bytes per token and the capacity that KVPP wins for a model."""
    shape = load_preset(preset)
    stages = preset_stages(shape, pp=_stages(pp), mtp=mtp)
    staging = payload != "full"
    model = plan_model(stages, ranks=tp, depth=depth, ownership=ownership, staging=staging)
    asked = {"preset": preset, "model": shape.model, "tp": tp, "mtp": mtp, "payload": payload}
    report = asked | describe(model)
    if ownership is Ownership.BYTES:
        by_count = plan_model(stages, ranks=tp, depth=depth, staging=staging)
        report["gain_over_count"] = gain_over_count(by_count, model)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(report)


def describe(model: ModelPlan) -> dict[str, Any]:
    """The figures of a plan as plain data. Bytes are per token of a large cache, the presets' block."""
    without = max(logical_bytes_per_block(stage) for stage in model.stages)
    worst = _worst(model.stages)
    return {
        "capacity_multiplier": round(capacity_multiplier(model), 3),
        "bytes_per_token_without": without,
        "bytes_per_token_worst_rank": worst,
        "warning": _loss(model, without, worst) if worst > without else None,
        "stages": [_stage(number, stage) for number, stage in enumerate(model.stages)],
    }


def gain_over_count(by_count: ModelPlan, by_bytes: ModelPlan) -> dict[str, Any]:
    """What balancing bytes wins over balancing layers: the fullest rank's bytes, and blocks in a GiB."""
    before, after = _worst(by_count.stages), _worst(by_bytes.stages)
    blocks_before, blocks_after = (model_blocks(model, GIB) for model in (by_count, by_bytes))
    return {
        "bytes_per_token_worst_rank_by_count": before,
        "bytes_per_token_worst_rank_by_bytes": after,
        "blocks_per_gib_by_count": blocks_before,
        "blocks_per_gib_by_bytes": blocks_after,
        "blocks_per_gib": blocks_after - blocks_before,
        "percent": round(100 * (before / after - 1), 2),
        "owned_bytes_per_token_by_count": [
            [owned_bytes_per_block(stage, rank) for rank in range(stage.ranks)]
            for stage in by_count.stages
        ],
    }


def _worst(stages: Sequence[StagePlan]) -> float:
    return max(worst_physical_bytes_per_block(stage) for stage in stages)


def _bytes(amount: float) -> str:
    return f"{amount:,.10g}"  # an eighth of a byte shows, no .0 does


def _loss(model: ModelPlan, without: int, worst: float) -> str:
    costs = (
        f"With KVPP a token costs the fullest rank {_bytes(worst)} bytes, without it {_bytes(without)}"
    )
    full = _worst([replace(stage, staging=False) for stage in model.stages])
    if full <= without:
        return (
            f"{costs}: the two staging halves take more than ownership saves, so set the payload to full "
            f"here, with which it costs {_bytes(full)}."
        )
    return (
        f"{costs}: few layers per stage leave the scratch buffers larger than what ownership saves, so "
        "do not enable it here."
    )


def _stage(number: int, stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": number,
        "layers": len(stage.bundles),
        "layout_hash": stage.layout_hash,
        "scratch_bytes_per_token": scratch_bytes_per_block(stage),
        "draft_bytes_per_token": draft_bytes_per_block(stage),
        "staging_bytes_per_token": staging_bytes_per_block(stage),
        "ranks": [
            {
                "rank": rank,
                "layers": [bundle.spec.index for bundle in stage.owned(rank)],
                "owned_bytes_per_token": owned_bytes_per_block(stage, rank),
                "physical_bytes_per_token": physical_bytes_per_block(stage, rank)
                + staging_bytes_per_block(stage),
            }
            for rank in range(stage.ranks)
        ],
    }


def _stages(pp: str | None) -> tuple[int, ...] | None:
    if pp is None:
        return None
    try:
        return tuple(int(count) for count in pp.split(","))
    except ValueError as error:
        raise ConfigError(f"--pp is {pp!r}; expected layer counts such as 38,40.") from error


def _print(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{report['model']}, TP{report['tp']}, {len(report['stages'])} stage(s), "
        f"payload {report['payload']}: "
        f"{report['capacity_multiplier']:.3f} x the tokens of the same memory without KVPP",
        highlight=False,
    )
    if gain := report.get("gain_over_count"):
        console.print(
            "Ownership by bytes: the fullest rank holds "
            f"{_bytes(gain['bytes_per_token_worst_rank_by_bytes'])} bytes per token, by count "
            f"{_bytes(gain['bytes_per_token_worst_rank_by_count'])}; that is "
            f"{gain['blocks_per_gib']:+,} tokens per GiB "
            f"({gain['blocks_per_gib_by_count']:,} -> {gain['blocks_per_gib_by_bytes']:,}, "
            f"{gain['percent']:+.2f} %)",
            highlight=False,
        )
    for stage in report["stages"]:
        table = Table(title=f"stage {stage['stage']}, bytes per token")
        for column in ("rank", "layers", "owned", "drafts", "scratch", "staging", "all"):
            table.add_column(column, justify="right")
        for rank in stage["ranks"]:
            table.add_row(
                str(rank["rank"]),
                _span(rank["layers"]),
                _bytes(rank["owned_bytes_per_token"]),
                _bytes(stage["draft_bytes_per_token"]),
                _bytes(stage["scratch_bytes_per_token"]),
                _bytes(stage["staging_bytes_per_token"]),
                _bytes(rank["physical_bytes_per_token"]),
            )
        console.print(table)
    if report["warning"]:
        console.print(f"Warning: {report['warning']}", highlight=False)


def _span(layers: list[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if layers else "none"
