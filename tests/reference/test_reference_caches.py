"""The layouts themselves: bytes per token, what survives packing, and where a block ends."""

import pytest
import torch

from kvpp_dag.plan import load_preset, plan_stage
from kvpp_dag.runtime import Arena, LocalGroup
from tests.reference.caches import (
    BLOCK,
    COMPONENTS,
    INDEX,
    LATENT,
    LAYOUTS,
    ROPE,
    LayerCache,
    cache_spec,
    digest,
)
from tests.reference.partial import PartialTransport
from tests.runtime_support import SENTINEL

NUM_BLOCKS = 3


def arena(layout: str) -> Arena:
    """A rank that owns one layer with all components, filled with a sentinel."""
    plan = plan_stage([cache_spec("layers.0", 0, layout, indexer=True)], ranks=1)
    made = Arena(plan, rank=0, num_blocks=NUM_BLOCKS)
    made.cache(0).fill_(SENTINEL)
    return made


def layer_cache(made: Arena, layout: str) -> LayerCache:
    return LayerCache(LAYOUTS[layout], {name: made.component(0, name) for name in COMPONENTS})


def tokens(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def test_li_c8_is_the_layout_of_the_preset():
    preset = load_preset("glm-5.2-lic8")
    spec = cache_spec("layers.0", 0, "li-c8", indexer=True)
    sizes = {c.name: c.bytes_per_block for c in spec.components}
    assert sizes == {n: BLOCK * size for n, size in (preset.main | preset.indexer).items()}
    assert tuple(sizes) == COMPONENTS


def test_sfa_c8_packs_a_token_of_the_main_cache_in_656_bytes():
    assert LAYOUTS["sfa-c8"].nbytes == LATENT + 4 * 4 + 2 * ROPE == 656


@pytest.mark.parametrize(("layout", "error"), [("li-c8", 2**-8), ("sfa-c8", 2**-4)])
def test_what_is_written_is_read_up_to_rounding(layout: str, error: float):
    cache = layer_cache(arena(layout), layout)
    slots = torch.tensor([BLOCK - 1, BLOCK, 2 * BLOCK + 5])  # across a block's end
    kv, keys = tokens(3, LATENT + ROPE), tokens(3, INDEX)
    cache.write_main(slots, kv)
    cache.write_keys(slots, keys)
    torch.testing.assert_close(cache.read_main(slots), kv, rtol=error, atol=error)
    torch.testing.assert_close(cache.read_keys(slots), keys, rtol=0, atol=keys.abs().max() / 127)
    assert not torch.equal(cache.read_main(slots), kv)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_zeroing_a_block_leaves_its_neighbours_and_the_other_components_alone(layout: str, name: str):
    made = arena(layout)
    made.component(0, name)[1] = 0
    start = made.plan.bundles[0].component_offset(name, NUM_BLOCKS)
    size = made.component(0, name).shape[1]
    expected = torch.full_like(made.cache(0), SENTINEL)
    expected[start + size : start + 2 * size] = 0
    assert torch.equal(made.cache(0), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_is_written_within_its_own_row_of_every_component(layout: str):
    made = arena(layout)
    cache, slot = layer_cache(made, layout), torch.tensor([BLOCK + 7])
    cache.write_main(slot, tokens(1, LATENT + ROPE))
    cache.write_keys(slot, tokens(1, INDEX))
    for name in COMPONENTS:
        rows = made.component(0, name).view(NUM_BLOCKS * BLOCK, -1)
        touched = (rows != SENTINEL).any(dim=1).nonzero().flatten().tolist()
        assert touched == slot.tolist()


@pytest.mark.parametrize("sent", [COMPONENTS, ("main",), ("main", "indexer"), ("indexer", "scales"), ()])
def test_a_partial_transport_touches_what_it_sends_and_nothing_else(sent: tuple[str, ...]):
    made = arena("sfa-c8")
    before = {name: digest(made.component(0, name)) for name in COMPONENTS}
    inner = LocalGroup(1).transport(0)
    touched: list[torch.Tensor] = []

    class Filling:
        rank, size, agree = inner.rank, inner.size, inner.agree

        def prepare(self, view: torch.Tensor, owner: int):
            touched.append(view)
            return lambda: view.fill_(owner)

    PartialTransport(Filling(), made.plan, NUM_BLOCKS, sent).prepare(made.cache(0), 0)()
    changed = [name for name in COMPONENTS if digest(made.component(0, name)) != before[name]]
    assert tuple(changed) == sent
    assert len(touched) == (1 if sent == COMPONENTS else len(sent))
