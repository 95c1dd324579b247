"""KVPP in vllm-ascend: a worker of NPUs, the places where it reaches into the engine, and what it refuses.

Nothing here has run on an NPU. It runs on vllm-ascend's own code, over stand-in operators, in `tests/npu`.
"""
