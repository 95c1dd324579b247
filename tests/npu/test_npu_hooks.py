"""Where layers are hooked, on implementation objects of the tests' own: fused paths run on an NPU alone.

Not yet run: the fused operators themselves. Here it is shown which methods are wrapped, and on which object.
"""

from types import SimpleNamespace

import pytest

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.ascend import hooks
from kvpp_vllm.ascend.hooks import Implementation, hook_layers

pytestmark = pytest.mark.npu


class Native:
    """An implementation whose cache is written by methods of its own."""

    enable_mlapo = fa_quant_layer = False

    def __init__(self, log):
        self.log = log

    def exec_kv_decode(self):
        self.log.append("decode")

    def exec_kv_prefill(self):
        self.log.append("prefill")

    def forward(self, method):
        getattr(self, method)()
        self.log.append("attention")


class Fused(Native):
    """Where an adaptor for all layers writes the cache."""

    enable_mlapo = True

    def forward(self, method):
        self.log.append("fused write")


class WithHook(Native):
    """A version with a KVPP of its own."""

    layerwise_kv_cache_hook = None

    def forward(self, method):
        self.layerwise_kv_cache_hook.wait_for_layer("layer")
        self.log.append("attention")


class Forward:
    """Notes what hooks ask for."""

    def __init__(self, log, *layers):
        self.log = log
        self.active = True
        self.plan = SimpleNamespace(
            bundles=[
                SimpleNamespace(layer=layer, ordinal=ordinal) for ordinal, layer in enumerate(layers)
            ]
        )

    def acquire(self, ordinal):
        self.log.append(f"acquire {ordinal}")

    def release(self, ordinal):
        self.log.append(f"release {ordinal}")


@pytest.fixture
def known(monkeypatch):
    """The tests' implementations, as if they were vllm-ascend's of dense MLA."""
    dense = next(
        found for name, found in hooks.IMPLEMENTATIONS.items() if name.endswith("AscendMLAImpl")
    )
    for kind in (Native, Fused, WithHook):
        monkeypatch.setitem(hooks.IMPLEMENTATIONS, f"{kind.__module__}.{kind.__qualname__}", dense)
    return dense


def hooked(kind, log, layers=("a", "b")):
    made = {layer: SimpleNamespace(impl=kind(log)) for layer in layers}
    forward = Forward(log, *layers)
    hook_layers(forward, made)
    return made, forward


@pytest.mark.parametrize("method", ["exec_kv_decode", "exec_kv_prefill"])
def test_the_native_path_is_acquired_where_the_cache_is_written(known, method):
    log = []
    layers, _ = hooked(Native, log)
    layers["b"].impl.forward(method)
    assert log == ["acquire 1", method.removeprefix("exec_kv_"), "attention", "release 1"]


def test_the_fused_path_is_acquired_before_the_implementation_is_entered(known):
    log = []
    layers, _ = hooked(Fused, log)
    layers["a"].impl.forward("exec_kv_decode")
    assert log == ["acquire 0", "fused write", "release 0"]


def test_a_version_with_its_own_hook_is_acquired_there(known):
    log = []
    layers, _ = hooked(WithHook, log)
    layers["b"].impl.forward("exec_kv_decode")
    assert log == ["acquire 1", "attention", "release 1"]


def test_outside_a_forward_nothing_is_asked_for(known):
    log = []
    layers, forward = hooked(Native, log)
    forward.active = False
    layers["a"].impl.forward("exec_kv_decode")
    assert log == ["decode", "attention"]


def test_another_object_of_the_same_class_is_not_hooked(known):
    log = []
    hooked(Native, log)
    Native(log).forward("exec_kv_decode")
    assert log == ["decode", "attention"]


def test_an_unknown_implementation_is_refused():
    with pytest.raises(NotActiveError, match=r"Native\.forward, and this version knows where"):
        hooked(Native, [])


def test_a_method_that_is_gone_is_refused(known, monkeypatch):
    gone = Implementation(acquire=("exec_kv_gone",), release="forward")
    monkeypatch.setitem(hooks.IMPLEMENTATIONS, f"{Native.__module__}.{Native.__qualname__}", gone)
    with pytest.raises(NotActiveError, match=r"has no impl\.exec_kv_gone"):
        hooked(Native, [])
