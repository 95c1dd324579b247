"""What is refused under vllm-ascend, where its own packages would refuse first or cannot be installed."""

from types import SimpleNamespace

import pytest

from kvpp_vllm.ascend import checks


@pytest.fixture
def ascend(monkeypatch):
    """A vllm-ascend with a KVPP of its own, and nothing that every platform refuses."""
    monkeypatch.setattr(checks, "own_kvpp", lambda: True)
    monkeypatch.setattr(checks, "general_refusals", lambda vllm_config: iter(()))


def configuration(*, v2: bool) -> SimpleNamespace:
    eager = SimpleNamespace(cudagraph_mode=None, splitting_ops=None)
    return SimpleNamespace(compilation_config=eager, use_v2_model_runner=v2)


def test_model_runner_v2_is_refused_with_the_variable_that_changes_it(ascend):
    (reason,) = checks.ascend_refusals(configuration(v2=True))
    assert "set VLLM_USE_V2_MODEL_RUNNER=0" in reason


def test_model_runner_v1_is_not_refused(ascend):
    assert list(checks.ascend_refusals(configuration(v2=False))) == []
