"""Run a program: streams, storage, transports, the forward pass and the executor.

`ForwardPass` serves an engine that owns the compute and calls hooks around each layer; `Executor` runs
any graph whose nodes carry callables. Both take their streams, and what transfers, from outside.
"""

from kvpp_dag.runtime.arena import Arena, allocate_zeroed
from kvpp_dag.runtime.executor import Executor, State
from kvpp_dag.runtime.forward import ForwardPass, compile_forwards
from kvpp_dag.runtime.local import LocalGroup, LocalTransport
from kvpp_dag.runtime.manual import ManualStream
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.process_group import ProcessGroupTransport
from kvpp_dag.runtime.streams import CpuStream, Event, HostStream, Stream
from kvpp_dag.runtime.transport import Transport

__all__ = [
    "Arena",
    "CpuStream",
    "Event",
    "Executor",
    "ForwardPass",
    "HostStream",
    "LocalGroup",
    "LocalTransport",
    "ManualStream",
    "Observer",
    "ProcessGroupTransport",
    "State",
    "Stream",
    "Transport",
    "allocate_zeroed",
    "compile_forwards",
]
