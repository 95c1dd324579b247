"""Fixtures of the tests of a forward's hooks."""

import pytest

from tests.runtime.forward_support import LAYERS, Alone
from tests.runtime_support import make_engine, small_plan


@pytest.fixture
def transport():
    transport = Alone()
    yield transport
    transport.gate.set()


@pytest.fixture
def kvpp(transport):
    return make_engine(small_plan(LAYERS, 2), transport).forward
