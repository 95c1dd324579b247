"""vLLM's view of the test device."""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum

from tests.device.build import COLLECTIVES, NAME, native

WORKER = "vllm.v1.worker.gpu_worker.Worker"


class DevicePlatform(Platform):
    """A platform that vLLM does not ship, with vLLM's GPU worker."""

    _enum = PlatformEnum.OOT
    device_name = NAME
    device_type = NAME
    dispatch_key = "PrivateUse1"
    dist_backend = COLLECTIVES
    device_control_env_var = "KVPP_TEST_VISIBLE_DEVICES"
    simple_compile_backend = "eager"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        parallel.disable_custom_all_reduce = True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        module = "sparse" if attn_selector_config.use_sparse else "attention"
        return f"tests.support.gpu_platform.{module}.Backend"

    @classmethod
    def get_mla_prefill_backend_cls(cls, selector_config: Any) -> Any:
        from tests.support.gpu_platform.attention import Prefill

        return Prefill

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return NAME

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return torch.accelerator.get_memory_info(device_id)[1]

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> int:
        free, total = torch.accelerator.get_memory_info(device)
        return total - free

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        pass

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index or 0)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        pass

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 1

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        pass

    @classmethod
    def import_kernels(cls) -> None:
        CpuPlatform.import_kernels()
        _claim_operators()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        CpuPlatform.register_triton_kernel_overrides()


def _claim_operators() -> None:
    """vLLM's CPU build registers some operators for every backend; they have to be submitted like the others.

    Else they would run on the host at once, before what they read has been computed: wrong tokens, now and then.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if (
            name.startswith("_C")
            and name not in _claimed
            and has_kernel(name, "CompositeImplicitAutograd")
        ):
            _claimed.add(name)
            native().claim(*name.split("::"))


_claimed: set[str] = set()
