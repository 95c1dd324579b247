"""Any name is a kernel that is not there."""

import functools
from typing import Any

from torch_npu import missing


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return functools.partial(missing, name)
