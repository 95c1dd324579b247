"""What happened: a recorder for the runtime's callbacks, Chrome/Perfetto traces, and a summary."""

from kvpp_dag.trace.chrome import merge_chrome, to_chrome
from kvpp_dag.trace.recorder import ForwardRecord, Recorder, Span
from kvpp_dag.trace.summary import Summary, summarize

__all__ = ["ForwardRecord", "Recorder", "Span", "Summary", "merge_chrome", "summarize", "to_chrome"]
