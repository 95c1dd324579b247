"""Model Runner V2 on the test device: Triton's interpreter runs each launch as one kernel of the current stream."""

import threading
from typing import Any

from tests.device.build import launch_on_test_device, native
from tests.support.gpu_platform.kernels import on_host

_one_at_a_time = threading.Lock()  # the interpreter patches modules while it runs


def register() -> None:
    """Submit launches, and give kernels the device's view of pinned memory."""
    from triton.runtime.interpreter import GridExecutor
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu import buffer_utils

    if GridExecutor.__call__.__module__ == __name__:
        return
    stock = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        args = on_host(args)
        kwargs = {name: on_host(value) for name, value in kwargs.items()}

        def kernel() -> None:
            with _one_at_a_time:
                stock(self, *args, **kwargs)

        launch_on_test_device(kernel)

    GridExecutor.__call__ = call
    for module in (torch_utils, buffer_utils):
        module.get_accelerator_view_from_cpu_tensor = native().view_of_pinned
