"""Child process of the refusal tests: what vLLM says of configurations that ask for KVPP.

`python -m tests.vllm.refusals DIRECTORY`, with one model a subdirectory, prints a JSON object, case -> what was
raised or chosen. Every configuration is made by vLLM's own EngineArgs; a setting that vLLM refuses or clears on
a CPU is set on the finished configuration, before the plugin looks at it.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from docs.support import Row, read_table

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
ON = {"enable_kvpp": True}


def configuration(
    model: str, *, ranks: int = 2, eager: bool = True, additional: Any = ON, **more: Any
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        tensor_parallel_size=ranks,
        enforce_eager=eager,
        dtype="float32",
        block_size=16,
        kv_cache_memory_bytes=16 << 20,
        max_model_len=512,
        additional_config=additional,
        **more,
    ).create_engine_config()


def outcome(model: str, **settings: Any) -> str:
    with variables():
        try:
            config = configuration(model, **settings)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return config.parallel_config.worker_cls


def changed(model: str, part: str, field: str, value: Any, **settings: Any) -> str:
    """The outcome for a configuration that vLLM has finished without KVPP, after one change."""
    config = configuration(model, additional={}, **settings)
    setattr(getattr(config, part), field, value)
    return activated(config)


def activated(config: Any, additional: Any = ON) -> str:
    """The outcome for a configuration that vLLM has finished without KVPP."""
    from kvpp_vllm.plugin import activate

    config.additional_config = additional
    try:
        activate(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return config.parallel_config.worker_cls


@contextmanager
def variables(**changes: str) -> Iterator[None]:
    """Environment variables for a while. vLLM sets some by itself, which would reach the next case."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def keeping_graphs() -> Iterator[None]:
    """Let vLLM resolve compilation and CUDA graph modes as on a platform that has CUDA graphs."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = {name: getattr(compilation, name) for name in ("mode", "backend")}
        stock(vllm_config)
        for name, value in asked.items():
            setattr(compilation, name, value)

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    CpuPlatform.support_static_graph_mode = classmethod(lambda cls: True)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = stock
        del CpuPlatform.support_static_graph_mode


def main(directory: Path) -> None:
    mla, dense, hybrid, sliding, sparse, mtp = (
        str(directory / name) for name in ("mla", "dense", "hybrid", "sliding", "sparse", "mtp")
    )
    cases = supported(directory)
    cases |= asking(mla, dense) | models(hybrid, sliding, sparse) | cache_users(mla) | drafts(mla, mtp)
    cases |= graphs(mla, sparse) | after_vllm(mla)
    cases |= on_cuda(mla)
    cases |= {name: ascend(mla, directory / name) for name in ("ascend", "ascend with kvpp")}
    cases |= worker(mla)
    print("CASES " + json.dumps(cases))


def supported(directory: Path) -> dict[str, str]:
    """Every configuration of docs/support.toml, on each Model Runner that its row names."""
    return {
        name: row_outcome(directory, config, runner)
        for row in read_table().rows
        for name, config, runner in row_configurations(row)
    }


def row_configurations(row: Row) -> Iterator[tuple[str, dict[str, Any], str]]:
    """For each: the name of its case, the configuration as the table has it, and the Model Runner."""
    for runner in ("V1", "V2") if row.runner in ("both", "") else (row.runner,):
        for number, config in enumerate(row.config, start=1):
            yield f"row {row.number}, {row.what} [{runner}, {number}]", dict(config), runner


def row_outcome(directory: Path, config: dict[str, Any], runner: str) -> str:
    """The worker class and the Model Runner, or what was raised."""
    environ = config.pop("env", {}) | {"VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2"))}
    finished, kvpp = config.pop("finished", {}), config.pop("kvpp", None)
    with_ascend = importing(directory / "ascend") if config.pop("vllm_ascend", False) else nullcontext()
    with_graphs = keeping_graphs() if config.pop("graphs", False) else nullcontext()
    settings = {
        "model": str(directory / config.pop("model")),
        "ranks": config.pop("tensor_parallel_size", 2),
        "eager": config.pop("enforce_eager", True),
    }
    with variables(**environ), with_graphs, with_ascend as worker:
        try:
            made = configuration(**settings, additional={}, **config)
        except Exception as error:
            return f"vLLM refuses it: {type(error).__name__}: {error}"
        made.parallel_config.worker_cls = worker or made.parallel_config.worker_cls
        for place, value in finished.items():
            part, _, name = place.partition(".")
            setattr(getattr(made, part), name, value)
        chosen = activated(made, ON if kvpp is None else ON | {"kvpp": kvpp})
        return f"{chosen} on {'V2' if made.use_v2_model_runner else 'V1'}"


def asking(mla: str, dense: str) -> dict[str, str]:
    return {
        "on": outcome(mla),
        "off": outcome(mla, additional={}),
        "false": outcome(mla, additional={"enable_kvpp": False}),
        "tp1": outcome(mla, ranks=1),
        "not mla": outcome(dense),
        "unknown key": outcome(mla, additional=ON | {"kvpp": {"trace_dri": "/tmp/x"}}),
        "not a boolean": outcome(mla, additional={"enable_kvpp": "yes"}),
        "not an object": outcome(mla, additional=ON | {"kvpp": 3}),
        "relative trace_dir": outcome(mla, additional=ON | {"kvpp": {"trace_dir": "here"}}),
        "bad timeout": outcome(mla, additional=ON | {"kvpp": {"timeout_s": -1}}),
    }


def models(hybrid: str, sliding: str, sparse: str) -> dict[str, str]:
    return {
        "hybrid": outcome(hybrid),
        "sliding window": outcome(sliding),
        "sliding window off": outcome(sliding, disable_sliding_window=True),
        "sparse": outcome(sparse),
    }


def cache_users(mla: str) -> dict[str, str]:
    cases = {
        name: outcome(mla, kv_transfer_config={"kv_connector": connector, "kv_role": role})
        for name, connector, role in (
            ("connector", "ExampleConnector", "kv_both"),
            ("prefill side", "NixlConnector", "kv_producer"),
            ("decode side", "NixlConnector", "kv_consumer"),
        )
    }
    cases["offloading"] = outcome(mla, kv_offloading_size=1.0)
    for layout in ("BLHNC", "BLNHC", "BHLNC", "LBNHC"):
        with variables(VLLM_KV_CACHE_LAYOUT=layout):
            cases[f"layout {layout}"] = outcome(mla)
    return cases


def drafts(mla: str, mtp: str) -> dict[str, str]:
    def speculating(target: str, method: str, **more: Any) -> str:
        return outcome(
            target, speculative_config={"method": method, "num_speculative_tokens": 2, **more}
        )

    schedule = [(1, 4, 2), (5, 8, 1)]
    return {
        "mtp": speculating(mtp, "mtp"),
        "dynamic mtp": speculating(mtp, "mtp", num_speculative_tokens_per_batch_size=schedule),
        "ngram": speculating(mla, "ngram", prompt_lookup_max=3),
        "draft model": speculating(mla, "draft_model", model=mla),
        "custom drafts": speculating(mla, "custom_class", model="some.Proposer"),
    }


def graphs(mla: str, sparse: str) -> dict[str, str]:
    """Graph modes as vLLM resolves them on a platform that has graphs; a CPU has none."""
    cases = {"compiled, no graphs": outcome(mla, eager=False)}
    with variables(VLLM_USE_BREAKABLE_CUDAGRAPH="0"):
        cases["sparse compiled"] = outcome(sparse, eager=False)

    def compiled(**compilation: Any) -> str:
        return outcome(mla, eager=False, compilation_config=compilation)

    with keeping_graphs():
        cases["default graphs"] = compiled()
        cases["sparse default graphs"] = outcome(sparse, eager=False)
        for mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"):
            cases[mode] = compiled(cudagraph_mode=mode)
        cases["FULL uncompiled"] = compiled(cudagraph_mode="FULL", mode=0)
        piecewise = {"cudagraph_mode": "PIECEWISE"}
        cases["partition"] = compiled(**piecewise, use_inductor_graph_partition=True)
        attention = "vllm::unified_mla_attention_with_output"
        cases["update swallowed"] = compiled(**piecewise, splitting_ops=[attention])
        update = "vllm::unified_mla_kv_cache_update"
        cases["attention swallowed"] = compiled(**piecewise, splitting_ops=[update])
        cases["own split"] = compiled(**piecewise, splitting_ops=[update, attention])
        cases |= sparse_graphs(sparse, [update, attention])
        with variables(VLLM_USE_BREAKABLE_CUDAGRAPH="1"):
            cases["breakable"] = compiled(**piecewise)
            cases["breakable eager"] = outcome(mla)
    return cases


def sparse_graphs(sparse: str, mla_ops: list[str]) -> dict[str, str]:
    """Sparse attention without breakable graphs, which vLLM would choose for it and then compile nothing."""
    from vllm.platforms.cpu import CpuPlatform

    cases = {}
    with variables(VLLM_USE_BREAKABLE_CUDAGRAPH="0"):
        piecewise = {"eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
        cases["sparse PIECEWISE"] = outcome(sparse, **piecewise)
        for name, split in (("own split", mla_ops), ("update swallowed", mla_ops[1:])):
            config = {"cudagraph_mode": "PIECEWISE", "splitting_ops": split}
            cases[f"sparse {name}"] = outcome(sparse, eager=False, compilation_config=config)
        config = configuration(
            sparse,
            eager=False,
            compilation_config={"cudagraph_mode": "PIECEWISE", "splitting_ops": mla_ops},
        )
        cases["sparse pieces end at"] = " ".join(config.compilation_config.splitting_ops)
        for platform in ("cuda", "rocm"):
            finished = configuration(sparse, additional={}, **piecewise)
            stock = getattr(CpuPlatform, f"is_{platform}")
            setattr(CpuPlatform, f"is_{platform}", lambda self: True)
            cases[f"sparse PIECEWISE on {platform}"] = activated(finished)
            setattr(CpuPlatform, f"is_{platform}", stock)
    return cases


def after_vllm(mla: str) -> dict[str, str]:
    """Settings that vLLM refuses or clears on a CPU, or needs a package for."""
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    methods = ("suffix", "eagle", "eagle3", "medusa", "mlp_speculator", "ngram_gpu", "dflash", "dspark")
    methods += ("extract_hidden_states",)
    return {
        "dcp": outcome(mla, decode_context_parallel_size=2),
        "pcp": changed(mla, "parallel_config", "prefill_context_parallel_size", 2),
        "dbo": changed(mla, "parallel_config", "enable_dbo", True),
        "ubatch": outcome(mla, ubatch_size=2, all2all_backend="deepep_low_latency"),
    } | {
        f"method {method}": changed(
            mla, "speculative_config", "method", method, speculative_config=ngram
        )
        for method in methods
    }


def on_cuda(mla: str) -> dict[str, str]:
    """A configuration for a CUDA device. The torch of a CPU brings no NCCL, which every case is refused for too."""

    def found(**environment: str) -> str:
        with variables(**environment):
            return changed(mla, "device_config", "device_type", "cuda")

    fused = configuration(mla, additional={})
    fused.device_config.device_type = "cuda"
    fused.compilation_config.pass_config.fuse_allreduce_rms = True
    return {
        "on cuda": found(),
        "on cuda NCCL path": found(VLLM_NCCL_SO_PATH="/opt/libnccl.so"),
        "on cuda FlashInfer over PCIe": found(VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC="1"),
        "on cuda fused": activated(fused),
    }


def ascend(mla: str, directory: Path) -> str:
    """With the stand-in for vllm-ascend that `directory` holds."""
    with importing(directory) as worker:
        return changed(mla, "parallel_config", "worker_cls", worker)


@contextmanager
def importing(directory: Path) -> Iterator[str]:
    """Let the stand-in for vllm-ascend of `directory` be found for a while; gives its worker class."""
    sys.path.insert(0, str(directory))
    try:
        yield "vllm_ascend.worker.worker.NPUWorker"
    finally:
        sys.path.remove(str(directory))
        sys.modules.pop("vllm_ascend", None)


def worker(mla: str) -> dict[str, str]:
    from kvpp_vllm import checks

    checks.WORKERS.pop(CPU_WORKER)
    return {"other worker": outcome(mla)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
