"""vLLM's collectives beside KVPP's: what is refused or warned of, and in which order a worker prepares."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from vllm.v1.worker.gpu_worker import Worker

from kvpp_dag.errors import NotActiveError
from kvpp_dag.runtime import nccl
from kvpp_dag.runtime.nccl import LAUNCH_ORDER, MAX_CTAS, Found
from kvpp_vllm import collectives, transports, worker
from kvpp_vllm import steps as worker_steps
from kvpp_vllm.collectives import (
    EngineCollectives,
    collective_refusals,
    engine_collectives,
    prepare_collectives,
    refused_collectives,
    unordered_collectives,
)

GOOD = Found(nccl=(2, 27), cuda=(12, 9), driver=(13, 0), hip=None, environment={}, communicators=False)

REFUSED = {
    "FlashInfer": ({"flashinfer": True}, "VLLM_ALLREDUCE_USE_FLASHINFER=0"),
    "FlashInfer over PCIe": ({"flashinfer_pcie": True}, "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=0"),
    "fused": ({"fused": True}, "fuse_allreduce_rms to false"),
    "DeepEP low latency": ({"all2all": "deepep_low_latency"}, "all2all backend deepep_low_latency"),
    "another exchange": ({"all2all": "nixl_ep"}, "--all2all-backend allgather_reducescatter"),
    "an NCCL of vLLM's own": ({"library": "/opt/libnccl.so"}, "VLLM_NCCL_SO_PATH is '/opt/libnccl.so'"),
}
RIGHT = {
    "NCCL alone": {},
    "few blocks": {"custom": True, "symmetric": True},
    "experts over NCCL": {"all2all": "allgather_reducescatter"},
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_could_fill_a_device_or_is_unknown_to_nccl_is_refused(fields, words):
    (reason,) = refused_collectives(EngineCollectives(**fields))
    assert words in reason


@pytest.mark.parametrize("fields", RIGHT.values(), ids=RIGHT)
def test_what_finds_room_is_not_refused(fields):
    assert list(refused_collectives(EngineCollectives(**fields))) == []


def test_what_spins_on_few_blocks_is_warned_of():
    both = list(unordered_collectives(EngineCollectives(custom=True, symmetric=True)))
    assert len(both) == 2
    assert "custom all-reduce" in both[0]
    assert list(unordered_collectives(EngineCollectives(all2all="allgather_reducescatter"))) == []


def vllm_config(device="cuda", *, custom=True, **parallel):
    """The parts that are looked at, as vLLM makes them; it takes its custom all-reduce away on a CPU."""
    from vllm.config import CompilationConfig, ParallelConfig

    made = ParallelConfig(**parallel)
    made.disable_custom_all_reduce = not custom
    return SimpleNamespace(
        parallel_config=made,
        compilation_config=CompilationConfig(),
        device_config=SimpleNamespace(device_type=device),
        additional_config={"enable_kvpp": True},
    )


def test_vllms_own_settings_are_read(monkeypatch):
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "1")
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/opt/libnccl.so")
    config = vllm_config(custom=False)
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    assert engine_collectives(config) == EngineCollectives(
        flashinfer_pcie=True, fused=True, library="/opt/libnccl.so"
    )
    for name in (
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
        "VLLM_NCCL_SO_PATH",
    ):
        monkeypatch.delenv(name)
    assert engine_collectives(vllm_config()) == EngineCollectives(custom=True, symmetric=True)


@pytest.mark.parametrize(("size", "expected"), [(1, None), (2, "deepep_low_latency")])
def test_experts_of_one_engine_exchange_over_no_backend(size, expected):
    config = vllm_config(all2all_backend="deepep_low_latency", data_parallel_size=size)
    assert engine_collectives(config).all2all == expected


def test_flashinfer_counts_only_where_it_is_installed(monkeypatch):
    for spec, expected in ((None, False), (object(), True)):
        monkeypatch.setattr(collectives.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert engine_collectives(vllm_config()).flashinfer is expected


def test_a_configuration_for_cuda_is_refused_for_nccl_and_for_vllms_collectives(monkeypatch):
    config = vllm_config(all2all_backend="deepep_low_latency", data_parallel_size=2)
    monkeypatch.setattr(collectives, "find_nccl", lambda: replace(GOOD, nccl=(2, 20)))
    old, exchange = collective_refusals(config)
    assert "NCCL is 2.20" in old
    assert "deepep_low_latency" in exchange
    monkeypatch.setattr(collectives, "find_nccl", lambda: GOOD)
    assert list(collective_refusals(vllm_config())) == []


@pytest.mark.parametrize("device", ["cpu", "npu", "xpu", "kvppdev"])
def test_nothing_of_it_runs_for_other_devices(monkeypatch, device):
    """Whatever looked at NCCL or the environment would fail here."""
    for module, name in (
        (collectives, "find_nccl"),
        (collectives, "engine_collectives"),
        (nccl, "find_nccl"),
    ):
        monkeypatch.setattr(module, name, None)
    config = vllm_config(device, all2all_backend="deepep_low_latency", data_parallel_size=2)
    assert list(collective_refusals(config)) == []
    monkeypatch.delenv(LAUNCH_ORDER, raising=False)
    prepare_collectives(config)
    assert LAUNCH_ORDER not in nccl.os.environ
    with pytest.raises(TypeError):  # the control
        list(collective_refusals(vllm_config("cuda")))


def test_a_worker_prepares_before_vllm_makes_a_communicator_and_warms_up_behind(monkeypatch):
    """A device type of which there is none here: vLLM's part and torch's are stood in for, and take notes."""
    steps = []
    group = object()

    def note(step, result=None):
        return lambda *_, **__: steps.append(step) or result

    def init_device(self):
        self.device = torch.device("cuda", 0)
        steps.append(f"vLLM's communicators, order {nccl.os.environ.get(LAUNCH_ORDER)}")

    def new_group(ranks, *, backend, pg_options, **_):
        steps.append(f"group of {backend} with {pg_options.config.max_ctas} blocks")
        return group

    monkeypatch.setenv(LAUNCH_ORDER, "1")  # so that it is put back
    monkeypatch.delenv(LAUNCH_ORDER)
    monkeypatch.setattr(nccl, "find_nccl", note("versions", GOOD))
    monkeypatch.setattr(Worker, "init_device", init_device)
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=32)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(
        dist, "broadcast", lambda tensor, owner, group: steps.append(f"broadcast from {owner}")
    )
    monkeypatch.setattr(transports, "gather_bytes", note("hosts", [b"host", b"host"]))
    monkeypatch.setattr(torch, "zeros", note("token"))
    monkeypatch.setattr(torch.accelerator, "synchronize", note("synchronize"))
    tp = SimpleNamespace(ranks=[0, 1])
    monkeypatch.setattr(worker_steps, "get_tp_group", lambda: tp)
    monkeypatch.setattr(worker_steps, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(worker, "runner_kind", lambda config: SimpleNamespace(version="V1"))
    monkeypatch.setattr(worker, "check_seams", note("seams"))
    monkeypatch.setattr(worker_steps, "KvppRank", lambda **_: steps.append("rank"))
    made = object.__new__(worker.KvppWorker)
    made.vllm_config = vllm_config()
    made.init_device()
    assert steps == [
        "seams",
        "versions",
        "vLLM's communicators, order 1",
        f"group of cpu:gloo,cuda:nccl with {MAX_CTAS} blocks",
        "hosts",
        "token",
        "broadcast from 0",
        "broadcast from 1",
        "synchronize",
        "rank",
    ]


def test_a_worker_that_comes_too_late_starts_nothing(monkeypatch):
    monkeypatch.setattr(nccl, "find_nccl", lambda env: replace(GOOD, communicators=True))
    monkeypatch.setattr(worker, "runner_kind", lambda config: SimpleNamespace(version="V1"))
    monkeypatch.setattr(worker, "check_seams", lambda *_, **__: None)
    monkeypatch.setattr(Worker, "init_device", None)
    made = object.__new__(worker.KvppWorker)
    made.vllm_config = vllm_config()
    with pytest.raises(NotActiveError, match="torch has made a process group of NCCL already") as raised:
        made.init_device()
    assert str(raised.value).count(".") == str(raised.value).count("2.26") + 1


def test_warnings_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(nccl, "find_nccl", lambda env: replace(GOOD, cuda=(12, 1)))
    monkeypatch.setenv(LAUNCH_ORDER, "1")
    handler = logging.Handler()
    lines = []
    handler.emit = lambda entry: lines.append(entry.getMessage())
    collectives.logger.addHandler(handler)
    try:
        prepare_collectives(vllm_config())
    finally:
        collectives.logger.removeHandler(handler)
    assert len(lines) == 2
    assert "CUDA is 12.1" in lines[0]
    assert "vLLM's custom all-reduce" in lines[1]
