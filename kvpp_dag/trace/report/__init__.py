"""The overlap report: one self-contained HTML page of recordings (`to_html`)."""

from kvpp_dag.trace.report.page import to_html

__all__ = ["to_html"]
