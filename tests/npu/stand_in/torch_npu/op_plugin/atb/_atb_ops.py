"""Registers what `torch_npu.atb` has, which is there already."""


def _register_atb_extensions() -> None:
    pass
