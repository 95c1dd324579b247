"""A trace with the name and form of the `trace_view.json` that profilers of Ascend devices leave.

That file is the same Trace Event Format as in `chrome`, as a bare array of events. This was taken from what such
profilers write and other tools read; nobody has opened one of ours in MindStudio Insight.
"""

from collections.abc import Sequence

from kvpp_dag.trace.chrome import event_list
from kvpp_dag.trace.records import Recording

FILE_NAME = "trace_view.json"


def to_mindstudio(recordings: Sequence[Recording]) -> str:
    """Write the forwards of one or more ranks, one event a line, for a file named FILE_NAME."""
    return event_list(recordings) + "\n"
