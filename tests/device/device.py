"""The accelerator that the tests here run on: a real one where there is one, else the test device.

The test device is `device.cpp`, built once and loaded into this process; torch then knows it as `kvppdev`.
"""

import atexit
import ctypes
import hashlib
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import cpp_extension

from kvpp_dag.runtime import find_accelerator

SOURCE = Path(__file__).with_name("device.cpp")
STALL = 2.0
"""Seconds for which a real device is kept busy where the test device is held until it is let go."""


class Device:
    """A torch device, and what tests do to it. `simulated` says that it is the test device.

    `delay`, `stall` and `fail` are submitted to the current stream.
    """

    def __init__(self, torch_device: torch.device, *, simulated: bool) -> None:
        self.torch = torch_device
        self.simulated = simulated
        self._work = None if simulated else torch.ones(1024, 1024, device=torch_device)
        self._rounds_per_second = 0.0 if simulated else self._calibrate()

    def stream(self) -> torch.Stream:
        return torch.Stream(device=self.torch)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""
        if self.simulated:
            torch.ops.kvpp_device.delay(seconds)
        else:
            self._spin(int(seconds * self._rounds_per_second))

    def stall(self) -> None:
        """Keep the current stream from going on until `resume`, or for STALL seconds on a real device."""
        if self.simulated:
            torch.ops.kvpp_device.hold()
        else:
            self.delay(STALL)

    def resume(self) -> None:
        if self.simulated:
            torch.ops.kvpp_device.let_go()

    def allocations(self) -> int:
        """How often memory was allocated so far."""
        if self.simulated:
            return torch.ops.kvpp_device.allocations()
        return torch.accelerator.memory_stats()["allocation.all.allocated"]

    def _spin(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._work, self._work, out=self._result)

    def _calibrate(self) -> float:
        self._result = torch.empty_like(self._work)
        start, end = (torch.Event(self.torch, enable_timing=True) for _ in range(2))
        self._spin(20)
        start.record()
        self._spin(200)
        end.record()
        torch.accelerator.synchronize()
        return 200 / (start.elapsed_time(end) / 1000)


def open_device(cache: Path | None) -> Device:
    """The accelerator of this machine, or the test device, built under `cache`; one or the other."""
    if (real := find_accelerator()) is not None and real.type != "kvppdev":
        return Device(torch.device(real.type, torch.accelerator.current_device_index()), simulated=False)
    assert cache is not None
    load_test_device(build_test_device(cache))
    return Device(torch.device("kvppdev", 0), simulated=True)


def build_test_device(cache: Path) -> Path:
    """Compile device.cpp unless that was done before; return the library.

    Takes a quarter of a minute of one core. A name that depends on the source, and a file that appears
    whole, let several processes share `cache`, and an interrupted build leave nothing behind.
    """
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = cache / f"kvpp_device-{version}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder, "kvpp_device.so")
            includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-pthread"]
            command = ["c++", *flags, *includes, str(SOURCE), "-o", str(built), *libraries]
            subprocess.run([*command, "-ltorch_cpu", "-ltorch", "-lc10"], check=True)
            built.replace(library)
    return library


def load_test_device(library: Path) -> None:
    """Make torch know the test device; once per process."""
    if hasattr(torch, "kvppdev"):
        return
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend("kvppdev")
    module = types.ModuleType("torch.kvppdev")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    torch._register_device_module("kvppdev", module)
    atexit.register(_finish)  # what the streams still hold may need Python, which is about to end


def _finish() -> None:
    torch.ops.kvpp_device.let_go()
    torch.ops.kvpp_device.reset()
    torch.accelerator.synchronize()


_CALLBACK = ctypes.CFUNCTYPE(None)


def launch_on_test_device(function: Callable[[], object]) -> None:
    """Call `function` from the current stream of the test device; what it raises fails the device."""

    def call() -> None:
        try:
            function()
        except Exception as error:
            torch.ops.kvpp_device.report(str(error))
        finally:
            _pending.pop(id(callback))

    callback = _CALLBACK(call)
    _pending[id(callback)] = callback
    torch.ops.kvpp_device.launch(ctypes.cast(callback, ctypes.c_void_p).value)


_pending: dict[int, object] = {}
"""Callbacks that are still to be called, kept alive until then."""
