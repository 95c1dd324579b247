"""torch_npu.profiler: nothing is profiled."""

from torch_npu.profiler import dynamic_profile  # noqa: F401
