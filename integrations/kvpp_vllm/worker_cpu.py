"""The same worker on a CPU, in a module of its own.

Importing vLLM's CPU worker replaces torch's streams, events and accelerator calls by placeholders for the
whole process (`vllm/v1/worker/cpu/shm.py`), so nothing that a GPU worker needs may import it.
"""

from vllm.v1.worker.cpu_worker import CPUWorker

from kvpp_vllm.seams import CPU_SEAMS, Seam
from kvpp_vllm.worker import KvppWorker


class KvppCPUWorker(KvppWorker, CPUWorker):  # type: ignore[misc]
    """A worker on a CPU whose KV cache is pipelined over its tensor-parallel group."""

    kvpp_seams: tuple[Seam, ...] = CPU_SEAMS
