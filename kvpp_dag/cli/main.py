"""The commands, and how their errors reach the user."""

import sys
from typing import NoReturn

import typer

from kvpp_dag import __version__
from kvpp_dag.cli import check_device, demo, diff, explain, export, graphs, plans, report
from kvpp_dag.errors import KvppError

app = typer.Typer(
    name="kvpp-dag",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("plan")(plans.plan)
app.command("graph")(graphs.graph)
app.command("verify")(graphs.verify)
app.command("demo")(demo.demo)
app.command("check-device")(check_device.check_device)
app.command("explain")(explain.explain)
app.command("diff")(diff.diff)
app.command("export")(export.export)
app.command("report")(report.report)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvpp-dag {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Plan, inspect and verify KV pipeline parallelism, and see it at work in vLLM."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 a negative verdict, 2 bad input, 130 interrupted."""
    try:
        status = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("kvpp-dag: interrupted.", err=True)
        sys.exit(130)
    except (KvppError, OSError) as error:
        _fail(str(error))
    except Exception as error:
        # Typer brings a click of its own, whose base class for usage errors has no public name.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _fail(format_message())
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    typer.echo(f"kvpp-dag: {' '.join(message.split())}", err=True)
    sys.exit(2)
