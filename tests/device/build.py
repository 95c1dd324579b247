"""Compiles the test device, `cpp/`, and makes torch know it as `kvppdev`."""

import atexit
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

NAME = "kvppdev"
COLLECTIVES = "kvppccl"
"""The torch.distributed backend of the device: ordered by its streams, over gloo."""

SOURCES = Path(__file__).with_name("cpp")
DEVICES = 8


def build_test_device(cache: Path) -> Path:
    """Compile `cpp/` unless that was done before; return the library.

    Takes a minute of processor time. A name that depends on the sources, and a file that appears whole, let
    several processes share `cache`, and an interrupted build leave nothing behind.
    """
    sources = sorted(SOURCES.iterdir())
    contents = b"".join(source.read_bytes() for source in sources)
    version = hashlib.sha256(contents + torch.__version__.encode()).hexdigest()[:16]
    library = cache / f"kvpp_device-{version}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            units = [source for source in sources if source.suffix == ".cpp"]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(partial(_compile, Path(folder)), units))
            built = Path(folder, "kvpp_device.so")
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            libraries += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
            _run(["c++", "-shared", "-pthread", *map(str, objects), "-o", str(built), *libraries])
            built.replace(library)
    return library


def load_test_device(library: Path) -> None:
    """Make torch know the test device; once per process. Starts no thread, so that the process can still fork."""
    if hasattr(torch, NAME):
        return
    _native.append(load_native(library))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    dist.Backend.register_backend(COLLECTIVES, _make_collectives, devices=[NAME])
    atexit.register(finish)  # what the streams still hold may need Python, which is about to end


def load_native(library: Path) -> Any:
    """Load the extension module; the caller gives the device its name."""
    loader = importlib.machinery.ExtensionFileLoader("kvpp_device", str(library))
    spec = importlib.util.spec_from_loader("kvpp_device", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def native() -> Any:
    """The extension module: see `cpp/module.cpp`."""
    return _native[0]


def launch_on_test_device(function: Callable[[], object]) -> None:
    """Call `function` from the current stream of the test device; what it raises fails the device."""
    native().launch(function)


def _compile(folder: Path, source: Path) -> Path:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    includes.append(f"-isystem{sysconfig.get_path('include')}")
    built = folder / f"{source.stem}.o"
    flags = ["-std=c++20", "-O0", "-fPIC", "-pthread", "-DTORCH_EXTENSION_NAME=kvpp_device"]
    _run(["c++", *flags, *includes, "-c", str(source), "-o", str(built)])
    return built


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def _device_module() -> types.ModuleType:
    """What torch and vLLM look for in `torch.kvppdev`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.manual_seed = module.manual_seed_all = lambda seed: None  # the generator is the CPU's
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    return module


def _make_collectives(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    return native().make_collectives(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def finish() -> None:
    """Let go of what the streams still hold."""
    torch.ops.kvpp_device.let_go()
    torch.ops.kvpp_device.reset()
    with suppress(RuntimeError):  # what still runs may fail
        torch.accelerator.synchronize()


_native: list[Any] = []
