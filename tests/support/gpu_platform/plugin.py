"""The entry points: what makes the device vLLM's platform, and what has to act in every process of an engine."""

import os
from pathlib import Path

from kvpp_dag.runtime.vendors import VENDORS, Vendor
from tests.device.build import COLLECTIVES, NAME, load_test_device
from tests.support.gpu_platform import LIBRARY


def platform() -> str:
    """Make torch know the device, and return the platform's class."""
    from tests.support.gpu_platform.cuda_names import map_cuda_names

    load_test_device(Path(os.environ[LIBRARY]))
    map_cuda_names()
    VENDORS[NAME] = Vendor(collectives=COLLECTIVES)
    return "tests.support.gpu_platform.platform.DevicePlatform"


def general() -> None:
    """Put what needs vLLM's own modules in place; called once or more in each process."""
    from tests.support.gpu_platform import worker

    worker.register()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.support.gpu_platform import triton_launches

        triton_launches.register()
