"""Operators that torch_npu loads apart."""
