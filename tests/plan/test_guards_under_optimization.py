import os
import subprocess
import sys

SCRIPT = """
import sys
from kvpp_dag.errors import CapacityError, ConfigError, DumpError, GraphError, UnsoundGraphError
from kvpp_dag.graph import Graph, Kind, Node, ensure_sound, from_json, from_text, lower
from kvpp_dag.plan import Component, CacheSpec, budget, plan_stage

assert False, "asserts must be off here"
racing = (
    Node(id="a", kind=Kind.COMPUTE, stream="one", writes=("x",)),
    Node(id="b", kind=Kind.COMPUTE, stream="two", writes=("x",)),
)
spec = CacheSpec(layer="a", index=0, components=(Component(name="main", bytes_per_block=8),))
guards = [
    (ConfigError, lambda: Component(name="main", bytes_per_block=0)),
    (ConfigError, lambda: plan_stage([], ranks=0)),
    (ConfigError, lambda: plan_stage([spec, spec], ranks=2)),
    (CapacityError, lambda: budget.check_fits(plan_stage([spec], ranks=1), 0, 2, 8)),
    (GraphError, lambda: Graph(nodes=racing[:1] * 2)),
    (GraphError, lambda: lower(Graph(nodes=racing))),
    (UnsoundGraphError, lambda: ensure_sound([Graph(nodes=racing)])),
    (DumpError, lambda: from_text("digraph")),
    (DumpError, lambda: from_json("{}")),
]
raised = 0
for error, guard in guards:
    try:
        guard()
    except error:
        raised += 1
print(sys.flags.optimize, raised, len(guards))
"""


def test_guards_hold_without_asserts():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    level, raised, guards = map(int, done.stdout.split())
    assert level == 1
    assert raised == guards == 9
