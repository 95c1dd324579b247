"""torch_npu cannot be imported without Ascend's runtime: its wheel is read instead.

Every name that the accelerator path reaches in it must exist, with the signature that is used.
"""

import ast
import subprocess
import sys
import zipfile

import pytest

from kvpp_dag.runtime.vendors import VENDORS

VERSION = "2.13.0"

pytestmark = pytest.mark.matrix

# What torch.Stream, torch.Event and torch.accelerator call for a PrivateUse1 device: the methods of the
# device guard, by their C++ symbols, which hold the types of the arguments.
GUARD = {
    "the current device": "9getDeviceEv",
    "the current stream": "9getStreamEN3c106DeviceE",
    "torch.Stream(device=...)": "12getNewStreamEN3c106DeviceEi",
    "with stream": "14exchangeStreamEN3c106StreamE",
    "event.record": "6recordEPPvRKN3c106StreamEaNS4_9EventFlagE",
    "event.wait": "5blockEPvRKN3c106StreamE",
    "event.query": "10queryEventEPv",
    "event.synchronize": "16synchronizeEventEPv",
    "del event": "12destroyEventEPva",
    "event.elapsed_time": "11elapsedTimeEPvS2_a",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, as an archive; a download that fails is a failure of the test, with pip's reason."""
    folder = tmp_path_factory.mktemp("torch_npu")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    platform = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.11"]
    done = subprocess.run(
        [*command, *platform, f"torch_npu=={VERSION}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"torch_npu {VERSION} could not be downloaded: {done.stderr}"
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def sources(wheel):
    """Parsed Python files by name."""
    names = [
        "torch_npu/__init__.py",
        "torch_npu/_init/registry/backend.py",
        "torch_npu/_init/registry/distributed.py",
        "torch_npu/npu/__init__.py",
        "torch_npu/npu/utils.py",
        "torch_npu/npu/memory.py",
    ]
    return {name: ast.parse(wheel.read(name)) for name in names}


@pytest.fixture(scope="module")
def library(wheel):
    return wheel.read("torch_npu/lib/libtorch_npu.so")


def calls(tree, function):
    """The calls of `function`, dotted, in a file."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]


def functions(tree):
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def parameters(function):
    """Names of the parameters; one with a default ends in `=`."""
    names = [a.arg for a in function.args.posonlyargs + function.args.args]
    required = len(names) - len(function.args.defaults)
    return [name + "=" * (i >= required) for i, name in enumerate(names)]


def test_torch_loads_it_by_itself(wheel):
    text = wheel.read(f"torch_npu-{VERSION}.dist-info/entry_points.txt").decode()
    assert "[torch.backends]" in text
    assert "torch_npu:_autoload" in text
    assert VENDORS["npu"].package == "torch_npu"


def test_it_calls_the_device_type_npu_and_registers_its_module(sources):
    tree = sources["torch_npu/_init/registry/backend.py"]
    (rename,) = calls(tree, "torch.utils.rename_privateuse1_backend")
    (register,) = calls(tree, "torch._register_device_module")
    assert ast.unparse(rename.args[0]) == "'npu'"
    assert [ast.unparse(argument) for argument in register.args] == ["'npu'", "torch_npu.npu"]


def test_it_registers_the_collectives_that_the_table_names(sources):
    tree = sources["torch_npu/_init/registry/distributed.py"]
    registered = {
        ast.literal_eval(call.args[0]): {k.arg: k.value for k in call.keywords}
        for call in calls(tree, "torch.distributed.Backend.register_backend")
    }
    keywords = registered[VENDORS["npu"].collectives]
    assert ast.literal_eval(keywords["devices"]) == ["npu"]
    assert ast.literal_eval(keywords["extended_api"]) is True


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("is_available", "torch_npu/npu/__init__.py", []),
        ("device_count", "torch_npu/npu/__init__.py", []),
        ("current_device", "torch_npu/npu/utils.py", []),
        ("memory_stats", "torch_npu/npu/memory.py", ["device="]),
    ],
)
def test_the_device_module_has_what_torch_accelerator_calls(sources, name, file, expected):
    assert parameters(functions(sources[file])[name]) == expected
    exported = ast.unparse(sources["torch_npu/npu/__init__.py"])
    assert f"'{name}'" in exported


@pytest.mark.parametrize("name", GUARD.values(), ids=GUARD)
def test_its_device_guard_implements_what_streams_and_events_call(library, name):
    assert f"_ZNK7c10_npu4impl12NPUGuardImpl{name}\0".encode() in library


def test_control_a_name_that_does_not_exist_is_not_found(library):
    assert b"_ZNK7c10_npu4impl12NPUGuardImpl12getNewStreamEN3c106DeviceE\0" not in library


def test_broadcast_is_a_method_of_its_process_group(library):
    assert b"_ZN8c10d_npu16ProcessGroupHCCL9broadcastER" in library
