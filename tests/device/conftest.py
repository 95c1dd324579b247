"""The device, opened once per session and healthy before every test."""

import pytest
import torch

from tests.device.device import Device, open_device


@pytest.fixture(scope="session")
def opened_device(pytestconfig) -> Device:
    return open_device(pytestconfig.cache.mkdir("kvpp_device"))


@pytest.fixture
def device(opened_device):
    """The accelerator; what a test left undone or broken on it is put right afterwards."""
    yield opened_device
    opened_device.resume()
    if opened_device.simulated:
        torch.ops.kvpp_device.random_query(False)
        torch.ops.kvpp_device.reset()
    torch.accelerator.synchronize()


@pytest.fixture
def simulated(device) -> Device:
    """The test device, for what no real one lets a test do."""
    if not device.simulated:
        pytest.skip("a real accelerator cannot be made to fail, or to lie, on purpose")
    return device
