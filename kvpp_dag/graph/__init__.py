"""A forward as a DAG: nodes, build, verify, lower, and the text, DOT and JSON forms.

Pure data: nothing here imports torch. `build_forward` compiles a plan into a `Graph`, `verify` proves it
free of races and deadlocks, `lower` turns it into the flat program that the runtime executes.
"""

from kvpp_dag.graph.build import build_collectives, build_forward
from kvpp_dag.graph.dot import to_dot
from kvpp_dag.graph.finding import Finding
from kvpp_dag.graph.json import from_json, to_json, to_networkx
from kvpp_dag.graph.lower import Program, Step, Wait, lower
from kvpp_dag.graph.nodes import (
    COMPUTE_STREAM,
    COPY_STREAM,
    ENGINE_GROUP,
    KVPP_GROUP,
    TRANSFER_STREAM,
    Collectives,
    Graph,
    Kind,
    Node,
    Policy,
    without_edge,
)
from kvpp_dag.graph.sequence import ensure_sound, verify_sequences
from kvpp_dag.graph.text import from_text, to_text
from kvpp_dag.graph.verify import verify, verify_alone, verify_group

__all__ = [
    "COMPUTE_STREAM",
    "COPY_STREAM",
    "ENGINE_GROUP",
    "KVPP_GROUP",
    "TRANSFER_STREAM",
    "Collectives",
    "Finding",
    "Graph",
    "Kind",
    "Node",
    "Policy",
    "Program",
    "Step",
    "Wait",
    "build_collectives",
    "build_forward",
    "ensure_sound",
    "from_json",
    "from_text",
    "lower",
    "to_dot",
    "to_json",
    "to_networkx",
    "to_text",
    "verify",
    "verify_alone",
    "verify_group",
    "verify_sequences",
    "without_edge",
]
