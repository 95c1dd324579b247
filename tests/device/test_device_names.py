"""An engine that replaces `torch.Event` for its whole process does not change the streams' events."""

import pytest
import torch

from tests.device.ranks import reference, serve_ranks

LAYERS = 5
BLOCKS = (0, 1, 2, 0, 1)


class TakesNoDevice:
    """With the parameters of torch_npu's event, which vllm-ascend's model runner puts in the place of torch's."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        if not isinstance(enable_timing, bool):
            raise TypeError("enable_timing must be a bool")


def test_ranks_serve_the_same_when_an_engine_has_replaced_torchs_event(device, monkeypatch):
    expected = reference(device, LAYERS, BLOCKS)
    monkeypatch.setattr(torch, "Event", TakesNoDevice)
    assert all(rank.outputs == expected.outputs for rank in serve_ranks(device, 2, LAYERS, BLOCKS))


def test_control_the_replaced_class_refuses_a_device(device, monkeypatch):
    monkeypatch.setattr(torch, "Event", TakesNoDevice)
    with pytest.raises(TypeError, match="enable_timing must be a bool"):
        torch.Event(device.torch)
