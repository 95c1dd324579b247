"""kvpp_dag: an event-driven scheduler of KV pipeline parallelism (KVPP) transfers.

Each rank of a KVPP group owns the KV cache of some layers; a forward pass is compiled into a small
dependency graph whose broadcasts bring every other layer's cache into two scratch slots, one layer
ahead of use. Rooms, imports pointing downwards only: `cli`, `trace`, `runtime`, `graph`, `plan`,
`errors`.
"""

__version__ = "0.1.0"
