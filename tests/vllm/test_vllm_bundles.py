"""From vLLM's specs and classes to bundles, views and hooks, without an engine: sparse models, real vLLM objects."""

import pytest
import torch

from kvpp_dag.errors import NotActiveError
from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import Arena, ForwardPass, HostStream, LocalGroup
from kvpp_vllm.allocation import engine_views
from kvpp_vllm.attention import MLA, attention_of
from kvpp_vllm.hooks import hook_layers
from kvpp_vllm.specs import cache_specs

BLOCKS, TOKENS = 5, 16
MAIN_PAGE, INDEXER_PAGE = TOKENS * 576 * 4, TOKENS * 132


def main_name(layer):
    return f"model.layers.{layer}.self_attn.attn"


def indexer_name(layer):
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def sparse_specs(layers, *, with_indexer):
    """As a worker reports them: each indexer before its layer's main cache."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    sizes = {"block_size": TOKENS, "num_kv_heads": 1, "max_tp_shards": 1}
    specs = {}
    for layer in range(layers):
        if layer in with_indexer:
            specs[indexer_name(layer)] = MLAAttentionSpec(
                **sizes, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
            )
        specs[main_name(layer)] = MLAAttentionSpec(
            **sizes,
            head_size=576,
            dtype=torch.float32,
            is_index_group_leader=layer in with_indexer,
        )
    return specs


@pytest.fixture
def specs():
    return sparse_specs(6, with_indexer={0, 1, 3, 5})


def arena_and_views(specs, rank):
    """Views of a rank of two, as its model runner gets them."""
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        UniformTypeKVCacheSpecs,
    )

    arena = Arena(plan_stage(cache_specs(specs), ranks=2), rank=rank, num_blocks=BLOCKS)
    uniform = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    group = KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=uniform)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
    return arena, engine_views(arena, config, KVCacheLayout.LBNHC, [TOKENS])


def test_the_main_cache_comes_first_in_a_bundle_whatever_the_report(specs):
    """Case 26 as well: a layer without an indexer has a bundle of one cache."""
    result = cache_specs(specs)
    found = [[c.name for c in spec.components] for spec in result]
    both = [[main_name(i), indexer_name(i)] if i in (0, 1, 3, 5) else [main_name(i)] for i in range(6)]
    assert found == both
    assert [spec.layer for spec in result] == [main_name(i) for i in range(6)]
    assert [spec.index for spec in result] == list(range(6))


def test_packed_caches_count_their_bytes_not_their_head_size():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    packed = MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    (spec,) = cache_specs({main_name(0): packed})
    assert spec.bytes_per_block == TOKENS * 656


def test_views_lie_in_the_bundle_that_is_sent(specs):
    arena, views = arena_and_views(specs, rank=0)
    for bundle in arena.plan.bundles:
        start = arena.cache(bundle.ordinal).data_ptr()
        size = arena.cache(bundle.ordinal).numel()
        assert arena.cache(bundle.ordinal).is_contiguous()
        offset = 0
        for component in bundle.spec.components:
            view = views[component.name]
            assert view.data_ptr() == start + offset
            assert view.stride(0) * view.element_size() == component.bytes_per_block
            offset += component.bytes_per_block * BLOCKS
        assert offset == size


@pytest.mark.parametrize("rank", [0, 1])
def test_vllm_zeroes_a_block_and_no_neighbour(specs, rank, monkeypatch):
    """Case 16, with vLLM's own zeroer, which wants one block stride per address: scratch slots are shared."""
    from types import SimpleNamespace

    from vllm.v1.worker import utils

    from tests.support.sparse_controls import MemsetKernel

    _, views = arena_and_views(specs, rank)
    groups = [
        SimpleNamespace(
            kv_cache_spec=spec, kv_cache_group_id=0, layer_names=[name], kernel_block_stride=0
        )
        for name, spec in specs.items()
    ]
    layers = {name: SimpleNamespace(kv_cache=view.squeeze(1)) for name, view in views.items()}
    for view in views.values():
        view.view(torch.uint8).fill_(0xFF)
    monkeypatch.setattr(utils, "_zero_kv_blocks_kernel", MemsetKernel())
    utils.KVBlockZeroer(torch.device("cpu"), groups, [TOKENS], layers, BLOCKS).zero_block_ids([2])
    for name, view in views.items():
        by_block = view.view(torch.uint8).flatten(1)
        assert by_block[2].count_nonzero() == 0, name
        assert (by_block[[0, 1, 3, 4]] == 0xFF).all(), name


def mla_layer(cls=None):
    """A layer of vLLM's class, without weights."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    layer = (cls or MLAAttention).__new__(cls or MLAAttention)
    torch.nn.Module.__init__(layer)
    return layer


def test_a_subclass_that_keeps_forward_is_hooked_as_its_base():
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    class Padded(MLAAttention):
        pass

    assert attention_of(mla_layer(), "layer") is MLA
    assert attention_of(mla_layer(Padded), "layer") is MLA


def test_a_class_with_a_forward_of_its_own_is_refused_by_name():
    """Case 4: it has all methods of the generic path, and need not call them."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    class Fused(MLAAttention):
        def forward(self, positions, hidden_states):
            return hidden_states

    with pytest.raises(NotActiveError, match=r"layer 'model\.layers\.3.*Fused\.forward"):
        attention_of(mla_layer(Fused), main_name(3))


def one_rank(specs):
    arena = Arena(plan_stage(cache_specs(specs), ranks=1), rank=0, num_blocks=BLOCKS)
    streams = {name: HostStream(name, timeout=5) for name in (COMPUTE_STREAM, TRANSFER_STREAM)}
    return ForwardPass(
        arena=arena,
        transport=LocalGroup(1).transport(0),
        compute=streams[COMPUTE_STREAM],
        transfer=streams[TRANSFER_STREAM],
    )


def test_a_cache_that_is_not_the_layers_indexer_is_refused(specs):
    layers = {name: mla_layer() for name in specs}
    with pytest.raises(NotActiveError, match="shares its index with the caches"):
        hook_layers(one_rank(specs), layers, compiled=False)


def test_an_indexer_without_its_operation_is_refused(specs):
    layers = {name: mla_layer() for name in specs}
    indexer = torch.nn.Module()
    indexer.k_cache = layers[indexer_name(0)]
    layers[main_name(0)].indexer = indexer
    with pytest.raises(NotActiveError, match=r"has no indexer\.indexer_op\.forward"):
        hook_layers(one_rank(specs), layers, compiled=False)


def sparse_layers(specs):
    """Modules by name, with indexers for the layers that have one."""
    layers = {name: mla_layer() for name in specs}
    for index in (0, 1, 3, 5):
        indexer = torch.nn.Module()
        indexer.k_cache = layers[indexer_name(index)]
        layers[main_name(index)].indexer = indexer
    for layer in layers.values():
        layer.prepare_kv_cache_update = lambda metadata: metadata
        layer.forward_impl = lambda *inputs: inputs
    return layers


def call_indexer_op(name):
    """vLLM's operator, with a kernel that only says that it ran."""
    from vllm.utils.torch_utils import _encode_layer_name

    empty, ran = torch.zeros(1), torch.zeros(1)
    torch.ops.vllm.sparse_attn_indexer(
        empty,
        _encode_layer_name(name),
        empty,
        empty,
        None,
        None,
        empty,
        *(1, None, 1, 1, 1, 1),
        ran,
        *(False, False, False),
        _encode_layer_name(""),
    )
    return bool(ran)


@pytest.fixture
def indexer_op():
    from vllm.model_executor.layers import sparse_attn_indexer  # noqa: F401 - defines the operator

    library = torch.library.Library("vllm", "IMPL")

    def kernel(*args):
        args[13].fill_(1)
        return args[13].clone()

    library.impl("sparse_attn_indexer", kernel, "CPU")
    return library


def test_in_a_compiled_model_the_indexers_operator_acquires(specs, indexer_op):
    forward, layers = one_rank(specs), sparse_layers(specs)
    kept = hook_layers(forward, layers, compiled=True)
    assert call_indexer_op(indexer_name(0))  # outside a forward it only runs
    forward.begin(history=False)
    assert call_indexer_op("model.layers.9.self_attn.indexer.k_cache")  # a draft layer's
    assert forward.held is None
    assert call_indexer_op(indexer_name(0))
    assert forward.held == 0
    layers[main_name(0)].prepare_kv_cache_update(None)
    layers[main_name(0)].forward_impl()
    call_indexer_op(indexer_name(1))
    layers[main_name(1)].forward_impl()
    layers[main_name(2)].prepare_kv_cache_update(None)  # without an indexer
    assert forward.held == 2
    del kept
    forward.abort()
    forward.begin(history=False)
    assert call_indexer_op(indexer_name(0))
    assert forward.held is None
    forward.abort()


def test_a_compiled_model_whose_indexer_went_another_way_is_refused(specs, indexer_op):
    forward, layers = one_rank(specs), sparse_layers(specs)
    kept = hook_layers(forward, layers, compiled=True)
    forward.begin(history=False)
    with pytest.raises(
        NotActiveError,
        match=r"'model\.layers\.0.*has not run as the operator vllm::sparse_attn_indexer.*eager",
    ):
        layers[main_name(0)].prepare_kv_cache_update(None)
    forward.abort()
    del kept
