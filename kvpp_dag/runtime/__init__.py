"""Run a program: streams, storage, transports, the forward pass and the executor.

`ForwardPass` serves an engine that owns the compute and calls hooks around each layer; `Executor` runs
any graph whose nodes carry callables. Both take their streams, and what transfers, from outside.
"""

from kvpp_dag.runtime.accelerator import AcceleratorEvent, AcceleratorStream, Completion, CurrentStream
from kvpp_dag.runtime.arena import Allocate, Arena, allocate_zeroed
from kvpp_dag.runtime.calibrate import measure_costs
from kvpp_dag.runtime.canary import VerifyingTransport
from kvpp_dag.runtime.compile import compile_forwards
from kvpp_dag.runtime.executor import Executor, State
from kvpp_dag.runtime.forward import ForwardPass
from kvpp_dag.runtime.groups import new_group, warm_up
from kvpp_dag.runtime.kinds import Streams, make_streams
from kvpp_dag.runtime.links import host_identity
from kvpp_dag.runtime.local import LocalGroup, LocalTransport
from kvpp_dag.runtime.manual import ManualStream
from kvpp_dag.runtime.nccl import find_nccl, judge_nccl, prepare_nccl
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.payload import Costs, Payload
from kvpp_dag.runtime.process_group import ProcessGroupTransport, gather_bytes
from kvpp_dag.runtime.self_check import SelfCheck, check_forwards
from kvpp_dag.runtime.shared_memory import SharedMemoryTransport
from kvpp_dag.runtime.streams import CpuStream, Event, HostEvent, HostStream, Stream
from kvpp_dag.runtime.transport import Transport
from kvpp_dag.runtime.vendors import find_accelerator, group_backend, uses_nccl

__all__ = [
    "AcceleratorEvent",
    "AcceleratorStream",
    "Allocate",
    "Arena",
    "Completion",
    "Costs",
    "CpuStream",
    "CurrentStream",
    "Event",
    "Executor",
    "ForwardPass",
    "HostEvent",
    "HostStream",
    "LocalGroup",
    "LocalTransport",
    "ManualStream",
    "Observer",
    "Payload",
    "ProcessGroupTransport",
    "SelfCheck",
    "SharedMemoryTransport",
    "State",
    "Stream",
    "Streams",
    "Transport",
    "VerifyingTransport",
    "allocate_zeroed",
    "check_forwards",
    "compile_forwards",
    "find_accelerator",
    "find_nccl",
    "gather_bytes",
    "group_backend",
    "host_identity",
    "judge_nccl",
    "make_streams",
    "measure_costs",
    "new_group",
    "prepare_nccl",
    "uses_nccl",
    "warm_up",
]
