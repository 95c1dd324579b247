"""What happened: recordings of forwards, where compute waited and why, exports, and the report page.

`Recorder` runs beside the runtime and imports torch; all else reads what it left and does not, so that
looking at a dump is quick and works on a machine without torch.
"""

from typing import TYPE_CHECKING, Any

from kvpp_dag.trace.chrome import to_chrome
from kvpp_dag.trace.overlap import analyze
from kvpp_dag.trace.records import ForwardRecord, Recording, Span
from kvpp_dag.trace.summary import Summary, summarize

if TYPE_CHECKING:
    from kvpp_dag.trace.recorder import Recorder

__all__ = [
    "ForwardRecord",
    "Recorder",
    "Recording",
    "Span",
    "Summary",
    "analyze",
    "summarize",
    "to_chrome",
]


def __getattr__(name: str) -> Any:
    if name != "Recorder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpp_dag.trace.recorder import Recorder  # noqa: PLC0415 - see the docstring

    return Recorder
