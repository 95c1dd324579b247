"""Names of nodes outside the graph: in traces, and as ranges beside the kernels of a user's own profile."""

import re

_LABEL = re.compile(r"([^\[]*)\[([0-9]+)\]")


def range_name(node: str) -> str:
    """`broadcast[12]` is `kvpp.broadcast.layer_12`; an id without an index, `prologue`, is `kvpp.prologue`."""
    match = _LABEL.fullmatch(node)
    return f"kvpp.{match[1]}.layer_{match[2]}" if match else f"kvpp.{node}"


def wait_name(event: str) -> str:
    """The wait for `completion[12]` is `kvpp.wait.layer_12`."""
    match = _LABEL.fullmatch(event)
    return f"kvpp.wait.layer_{match[2]}" if match else f"kvpp.wait.{event}"
