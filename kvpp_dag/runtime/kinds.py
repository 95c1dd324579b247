"""Which streams a device's ranks run on."""

from dataclasses import dataclass
from typing import Any

import torch

from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM
from kvpp_dag.runtime.accelerator import AcceleratorStream, Completion, CurrentStream
from kvpp_dag.runtime.streams import CpuStream, HostStream, Stream


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The streams of one rank; see ForwardPass for what each is for."""

    compute: Stream[Any]
    transfer: Stream[Any]
    copy: Stream[Any]
    control: Stream[Any] | None


def make_streams(
    device: torch.device, *, timeout: float, completion: Completion = Completion.STREAM
) -> Streams:
    """Streams of the host for `cpu`, else those of the accelerator `device`.

    `completion` matters on an accelerator alone: a wait on the host always blocks it.
    """
    if device.type == "cpu":
        return Streams(
            compute=HostStream(COMPUTE_STREAM, timeout=timeout),
            transfer=CpuStream(TRANSFER_STREAM, timeout=timeout),
            copy=CpuStream(COPY_STREAM, timeout=timeout),
            control=None,
        )
    return Streams(
        compute=CurrentStream(COMPUTE_STREAM, device, timeout=timeout, completion=completion),
        transfer=AcceleratorStream(TRANSFER_STREAM, device),
        copy=AcceleratorStream(COPY_STREAM, device),
        control=CpuStream("control", timeout=timeout),
    )
