"""A platform on which vLLM's own GPU worker runs without a GPU: on the test device of `tests.device`.

The worker, both model runners, the scheduler, the models and KVPP's accelerator path are the real ones. In their place
stand the device (streams are threads, and every operator runs later than it is submitted), its collectives (over gloo,
ordered by the streams) and kernels (the CPU's, and Triton's under its interpreter). See docs/test-platform.md.

vLLM finds it as it finds any platform that it does not ship, by an entry point. This module imports neither torch nor
vLLM; the others are imported in engine processes only.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LIBRARY = "KVPP_TEST_DEVICE"
"""The environment variable with the path of the device's library; it is set where engines run on this platform."""

FAULTS = "kvpp_test_faults"
"""The key of vLLM's additional_config that holds `Faults`."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What a test changes on purpose about KVPP on the device; streams are named as in graphs.

    delays: stream -> seconds; before each piece of a stream's work, it is delayed by a random time up to that.
    dropped: the stream that ignores the waits it is given; with `dropped_events`, those for events named like that.
    way: a function of `tests.support.payloads` that chooses how forwards send.
    seed: of the delays.
    """

    delays: dict[str, float] = field(default_factory=dict)
    dropped: str | None = None
    dropped_events: str = ""
    way: str | None = None
    seed: int = 1


def with_faults(engine: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """Arguments of `vllm.LLM` like `engine`, with `faults` from before KVPP starts, by way of its additional_config."""
    additional = engine.get("additional_config", {}) | {FAULTS: asdict(faults)}
    return engine | {"additional_config": additional}


def environment(directory: Path, library: str) -> dict[str, str]:
    """Write the platform's entry points to `directory`, and return variables of an engine that runs on it.

    `directory` has to be on PYTHONPATH as well.
    """
    info = directory / "kvpp_gpu_platform-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpp-gpu-platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\nkvppdev = {__name__}.plugin:platform\n"
        f"[vllm.general_plugins]\nkvppdev = {__name__}.plugin:general\n"
    )
    return {LIBRARY: library, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
