"""What a rank keeps of its forwards: the recorder, the files of a trace directory, and a line in the log."""

import logging
from pathlib import Path
from typing import Protocol

import torch

from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import host_identity
from kvpp_dag.trace import ForwardRecord, Recorder, Recording, summarize
from kvpp_dag.trace.recorder import KEEP
from kvpp_vllm.config import KvppConfig
from kvpp_vllm.dumps import write_failure, write_trace

logger = logging.getLogger("vllm.kvpp")


class Write(Protocol):
    """Writes a recording into a directory and returns its path."""

    def __call__(self, directory: Path, recording: Recording, *, name: str) -> str:
        """Write; raises OSError."""


class RankTrace:
    """The recorder of one rank and what becomes of its records.

    Without `trace_forwards` the last forwards are written when the recorder is full for the first time, so
    that there is a trace even if the worker is killed, and again at shutdown; with it the chosen forwards,
    as soon as the last of them has ended. Nothing is written without a `trace_dir`.
    """

    def __init__(
        self, config: KvppConfig, *, stage: int, rank: int, ranks: int, device: torch.device
    ) -> None:
        self.name = f"stage{stage}.rank{rank}"
        self.recorder = Recorder(chosen=config.chosen_forwards) if config.record else None
        self._config = config
        self._stage = stage
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._plan: StagePlan | None = None
        self._num_blocks = 0
        chosen = config.chosen_forwards
        self._write_after = chosen.stop - 1 if chosen else KEEP

    def start(self, plan: StagePlan, num_blocks: int) -> None:
        """Say what the forwards run under; called before the first of them."""
        self._plan, self._num_blocks = plan, num_blocks

    def ended(self, number: int) -> None:
        """Write and log what is due now that forward `number` has ended."""
        if self.recorder is None:
            return
        if number == self._write_after:
            self.write()
        if self._config.log_every and number % self._config.log_every == 0:
            logger.info("KVPP %s after %d forwards: %s", self.name, number, self._last_forwards())

    def write(self) -> str | None:
        """Write the recorded forwards now; returns the recording's path, or None if there is none to write."""
        return self._write(write_trace, chosen=bool(self._config.chosen_forwards))

    def aborted(self, number: int, error: BaseException) -> None:
        """Keep the last forwards, the one that failed among them, and say where."""
        logger.error("KVPP %s aborted forward %d: %s", self.name, number, error)
        path = self._write(write_failure, chosen=False)
        if path is not None:
            logger.error(
                "KVPP %s: what ran and what waited is in %s; try kvpp-dag explain.", self.name, path
            )

    def _write(self, write: Write, *, chosen: bool) -> str | None:
        """Write, or log why not: neither a full disk nor a device that has failed must hide what led here."""
        if self.recorder is None or self._config.trace_dir is None:
            return None
        try:
            forwards = self._forwards(self.recorder, chosen=chosen)
            if not forwards:
                return None
            recording = Recording(
                rank=self._rank,
                ranks=self._ranks,
                stage=self._stage,
                clock=f"host-{host_identity().hex()[:12]}",
                num_blocks=self._num_blocks,
                plan=self._plan,
                forwards=forwards,
            )
            return write(self._config.trace_dir, recording, name=self.name)
        except (OSError, RuntimeError) as error:
            logger.error("KVPP %s could not write its trace: %s", self.name, error)
            return None

    def _forwards(self, recorder: Recorder, *, chosen: bool) -> tuple[ForwardRecord, ...]:
        """What was recorded; the times of a device can be read once it is done with them."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return recorder.chosen if chosen else recorder.forwards

    def _last_forwards(self) -> str:
        """What the last forwards sent and waited for."""
        if self.recorder is None:
            return "not recorded"
        total = summarize(self._forwards(self.recorder, chosen=False))
        hidden = 1 - min(1.0, total.exposed_ns / total.transfer_ns) if total.transfer_ns else 1.0
        return (
            f"of the last {total.forwards}, {total.forwards_with_history} with history sent "
            f"{total.bytes / 1e6:.1f} MB; compute waited {total.exposed_ns / 1e6:.1f} ms, {hidden:.0%} of the "
            "transfer time was hidden"
        )
