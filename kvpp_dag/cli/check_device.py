"""`kvpp-dag check-device`: a verdict and figures of KVPP on the accelerator of this machine."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvpp_dag.errors import ConfigError, KvppError

if TYPE_CHECKING:
    from kvpp_dag.check_device import Check

MOST_DEVICES = 8


def check_device(
    kind: Annotated[
        str | None, typer.Argument(help="cuda, npu or xpu [the one that torch finds].")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help=f"Devices to use together [all, up to {MOST_DEVICES}]; 1 leaves the rest out."
        ),
    ] = None,
) -> None:
    """Check KVPP's transfers on this machine's accelerator against one rank alone, and measure them.

    Takes under five minutes on one device, where ranks are threads and a transfer is a copy within the device;
    with several devices their collectives are checked too. Exit status 0 if everything is right, 1 if not, 2 if
    there is no device.
    """
    import torch  # noqa: PLC0415 - takes seconds, which the other commands need not spend

    from kvpp_dag.check_device import check_devices, check_one_device, measure, open_device  # noqa: PLC0415

    device = open_device(kind)
    there = min(torch.accelerator.device_count(), MOST_DEVICES)
    count = there if devices is None else devices
    if not 1 <= count <= there:
        raise ConfigError(
            f"--devices is {count}; expected 1 to {there}, the devices that torch finds here."
        )
    refused = _describe(device.torch.type, there)
    failed = [check.name for check in check_one_device(device) if not _report(check)]
    try:
        for name, figure in measure(device):
            typer.echo(f"{name}: {figure}")
    except (KvppError, RuntimeError) as error:  # of a device that has failed
        failed.append("figures")
        typer.echo(f"FAIL figures: {str(error).partition(chr(10))[0]}")
    if count == 1:
        typer.echo("collectives between devices: not checked, on one device")
    elif refused:
        failed.append("collectives between devices")
    else:
        failed += [check.name for check in check_devices(device, count) if not _report(check)]
    typer.echo(f"verdict: {'wrong: ' + '; '.join(failed) if failed else 'right'}")
    if failed:
        raise typer.Exit(1)


def _describe(kind: str, count: int) -> bool:
    """Print versions and, where collectives are NCCL's, what is said of them; whether it is a refusal."""
    import torch  # noqa: PLC0415

    from kvpp_dag import __version__  # noqa: PLC0415
    from kvpp_dag.runtime import find_nccl, judge_nccl, uses_nccl  # noqa: PLC0415

    typer.echo(f"device: {kind}, {count} of them; kvpp-dag {__version__}, torch {torch.__version__}")
    if not uses_nccl(kind):
        return False
    found = find_nccl()
    for name, version in (("NCCL", found.nccl), ("CUDA", found.cuda), ("driver", found.driver)):
        typer.echo(f"{name}: {'.'.join(map(str, version)) if version else 'not found'}")
    remarks = judge_nccl(found)
    for remark in remarks:
        typer.echo(f"{'REFUSED' if remark.refused else 'warning'}: {remark.message}")
    return any(remark.refused for remark in remarks)


def _report(check: "Check") -> bool:
    """Print one line and hand the result on."""
    detail = f": {check.detail}" if check.detail else ""
    typer.echo(f"{'ok  ' if check.passed else 'FAIL'} {check.name}{detail}")
    return check.passed
