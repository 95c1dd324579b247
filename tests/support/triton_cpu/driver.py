"""The driver that Triton's CPU backend would have."""

from typing import Any

from triton.backends.driver import DriverBase


class StandInDriver(DriverBase):
    """The one active driver; vLLM looks for it, and the interpreter does without."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError
