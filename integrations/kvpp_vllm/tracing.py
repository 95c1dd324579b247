"""What a rank keeps of its forwards: the recorder, the files of a trace directory, and a line in the log."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvpp_dag.errors import TransferError
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import host_identity
from kvpp_dag.trace import ForwardRecord, Recorder, Recording, Summary, summarize
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

    def __init__(self, config: KvppConfig, *, stage: int, rank: int, ranks: int) -> None:
        self.name = f"stage{stage}.rank{rank}"
        self.recorder = Recorder(chosen=config.chosen_forwards) if config.record else None
        self._config = config
        self._stage = stage
        self._rank = rank
        self._ranks = ranks
        self._over: Callable[[], object] | None = None
        self._plan: StagePlan | None = None
        self._num_blocks = 0
        chosen = config.chosen_forwards
        self._write_after = chosen.stop - 1 if chosen else KEEP

    def start(self, plan: StagePlan, num_blocks: int, over: Callable[[], object]) -> None:
        """Say what the forwards run under; called before the first of them.

        `over` blocks until a device has run those that have ended; it may raise.
        """
        self._plan, self._num_blocks, self._over = plan, num_blocks, over

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
        """Write, or log why not: whatever is wrong with the disk or the device must not hide what led here."""
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
        except Exception as error:
            logger.error("KVPP %s could not write its trace: %s", self.name, error)
            return None

    def _forwards(self, recorder: Recorder, *, chosen: bool) -> tuple[ForwardRecord, ...]:
        """What was recorded; the times of a device that has failed or hangs are missing, and that is logged."""
        try:
            if self._over is not None:
                self._over()
        except TransferError as error:
            logger.warning("KVPP %s does not know all times of its forwards: %s", self.name, error)
        return recorder.chosen if chosen else recorder.forwards

    def summary(self) -> Summary | None:
        """The figures of the last forwards; None if nothing is recorded, or they cannot be told, which is logged."""
        if self.recorder is None:
            return None
        try:
            return summarize(self._forwards(self.recorder, chosen=False))
        except Exception as error:
            logger.error("KVPP %s could not sum up its forwards: %s", self.name, error)
            return None

    def _last_forwards(self) -> str:
        """What the last forwards sent and waited for."""
        total = self.summary()
        if total is None:
            return "not recorded"
        hidden = 1 - min(1.0, total.exposed_ns / total.transfer_ns) if total.transfer_ns else 1.0
        return (
            f"of the last {total.forwards}, {total.forwards_with_history} with history sent "
            f"{total.bytes / 1e6:.1f} MB; compute waited {total.exposed_ns / 1e6:.1f} ms, {hidden:.0%} of the "
            "transfer time was hidden"
        )
