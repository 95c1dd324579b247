"""How an operator of the stand-in is defined: a torch function on host tensors, and the shapes of its results.

The test device runs it on its current stream, where shapes are known before it runs, or writes in place; else once
that stream is idle.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

OPERATORS: dict[str, Callable[..., Any]] = {}
"""What `torch_npu` has, by name."""

CALLS: Counter[str] = Counter()
"""How often each operator has run in this process."""

_libraries = {space: torch.library.Library(space, "FRAGMENT") for space in ("npu", "_C_ascend")}

Function = Callable[..., Any]


def operator(
    schema: str, *, space: str = "npu", shapes: Function | None = None, meta: bool = False
) -> Callable[[Function], Function]:
    """Define the operator of `schema`, whose kernel on the host is the function below.

    `shapes` is given meta tensors and returns such; with `meta` the function itself is, being plain torch.
    In `npu` the operator becomes a name of torch_npu too.
    """

    def define(function: Function) -> Function:
        name = schema.split("(", maxsplit=1)[0]
        library = _libraries[space]
        library.define(schema)
        call = getattr(getattr(torch.ops, space), name)
        # torch leaves out what is as the schema has it.
        usual = {a.name: a.default_value for a in call.default._schema.arguments if a.kwarg_only}

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            CALLS[name] += 1
            return function(*arguments, **(usual | named))

        library.impl(name, run, "CPU")
        if meta or shapes is not None:
            tell = shapes or function
            library.impl(name, lambda *arguments, **named: tell(*arguments, **(usual | named)), "Meta")
        if space == "npu":
            OPERATORS[name] = call
        return call

    return define


def python(function: Function) -> Function:
    """Let torch_npu have `function`, which calls operators."""
    OPERATORS[function.__name__] = function
    return function
