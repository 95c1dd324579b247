"""A process that imports a worker class of vLLM, then the plugin, and prints what that has changed.

`python -m tests.support.import_purity BASE [MODULE ...]`: BASE is the dotted class that vLLM's platform names and
imports itself; the modules are imported afterwards, or all of the plugin that serves BASE if none are named. Prints
a JSON list of the functions and classes of torch and vLLM, and of their classes' methods, that were replaced.
"""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import kvpp_vllm
from kvpp_vllm.checks import WORKERS

WATCHED = ("torch", "vllm", "vllm_ascend", "torch_npu")


def main(base: str, modules: list[str]) -> None:
    importlib.import_module(base.rpartition(".")[0])
    before = dict(names())
    for module in modules or plugin_modules(base):
        importlib.import_module(module)
    if not modules:
        check(WORKERS[base])
    after = dict(names())
    print(json.dumps(sorted(name for name, found in before.items() if after.get(name) is not found)))


def plugin_modules(base: str) -> list[str]:
    """All modules of the plugin but the worker classes of other bases."""
    others = {worker.rpartition(".")[0] for known, worker in WORKERS.items() if known != base}
    mine = WORKERS[base].rpartition(".")[0]
    found = [info.name for info in pkgutil.walk_packages(kvpp_vllm.__path__, "kvpp_vllm.")]
    return [name for name in found if name == mine or name not in others]


def check(worker: str) -> None:
    """Look at the seams that a worker looks at when it starts."""
    from kvpp_vllm.seams import check_seams

    module, _, name = worker.rpartition(".")
    check_seams(getattr(sys.modules[module], name).kvpp_seams)


def names() -> Iterator[tuple[str, Any]]:
    """Functions and classes of all watched modules that are loaded, and methods of their classes."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in WATCHED or module is None:
            continue
        for name, found in list(vars(module).items()):
            if callable(found):
                yield f"{module_name}.{name}", found
            if isinstance(found, type) and found.__module__ == module_name:
                yield from methods(f"{module_name}.{name}", found)


def methods(name: str, found: type) -> Iterator[tuple[str, Any]]:
    """Those of the bases too: a method that a class gains hides theirs."""
    members: dict[str, Any] = {}
    for base in reversed(found.__mro__):
        members |= vars(base)
    for member, value in members.items():
        if callable(value):
            yield f"{name}.{member}", value


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
