"""The storage of a rank: what is where, and what shares memory with what."""

import pytest
import torch

from kvpp_dag.errors import LayoutError
from kvpp_dag.runtime import Arena, allocate_zeroed
from tests.runtime_support import GuardedMemory, small_plan

BLOCKS = 6


def make(layers=5, ranks=2, rank=0, depth=1, **options):
    return Arena(small_plan(layers, ranks, depth), rank=rank, num_blocks=BLOCKS, **options)


def components_of(arena, ordinal):
    spec = arena.plan.bundles[ordinal].spec
    return [(c, arena.component(ordinal, c.name)) for c in spec.components]


@pytest.mark.parametrize("rank", [0, 1])
def test_components_lie_one_after_the_other_and_each_holds_all_blocks(rank):
    arena = make(rank=rank)
    for bundle in arena.plan.bundles:
        cache = arena.cache(bundle.ordinal)
        assert cache.shape == (bundle.bytes_per_block * BLOCKS,)
        at = cache.data_ptr()
        for component, view in components_of(arena, bundle.ordinal):
            assert view.shape == (BLOCKS, component.bytes_per_block)
            assert view.is_contiguous()
            assert view.data_ptr() == at
            offset = bundle.component_offset(component.name, BLOCKS)
            assert at == cache.data_ptr() + offset
            at += view.numel()
        assert at == cache.data_ptr() + cache.numel()


def test_an_owned_layer_is_stored_alone_and_the_others_share_their_slot():
    arena = make(layers=7, ranks=3, rank=1, depth=1)
    plan = arena.plan
    at = [arena.cache(i).data_ptr() for i in range(7)]
    slots = [arena.scratch(s).data_ptr() for s in range(plan.slots)]
    owned = [i for i in range(7) if plan.owners[i] == 1]
    assert owned == [3, 4]
    assert len({at[i] for i in owned} | set(slots)) == len(owned) + len(slots)
    for i in range(7):
        if i not in owned:
            assert at[i] == slots[i % 2]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_slots_are_one_more_than_the_depth_and_as_large_as_the_largest_bundle(depth):
    arena = make(depth=depth)
    sizes = [arena.scratch(s).numel() for s in range(depth + 1)]
    assert sizes == [arena.plan.largest_bundle * BLOCKS] * (depth + 1)
    with pytest.raises(IndexError):
        arena.scratch(depth + 1)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_bytes_are_owned_bundles_plus_drafts_plus_slots(rank):
    arena = make(layers=7, ranks=3, rank=rank)
    per_block = sum(b.bytes_per_block for b in arena.plan.owned(rank))
    per_block += sum(s.bytes_per_block for s in arena.plan.drafts) + 2 * arena.plan.largest_bundle
    assert arena.nbytes == per_block * BLOCKS


def test_a_draft_is_stored_on_every_rank_apart_from_everything_else():
    for rank in (0, 1):
        memory = GuardedMemory()
        arena = make(rank=rank, allocate=memory)
        draft = arena.draft("mtp.0.attn", "main")
        assert draft.shape == (BLOCKS, 40)
        before = draft.clone()
        for ordinal in range(5):
            arena.cache(ordinal).fill_(1)
        assert torch.equal(draft, before)
        draft.fill_(2)
        assert all(bool((arena.cache(i) == 1).all()) for i in range(5))
        assert memory.guards_intact()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("block", [1, BLOCKS - 2])
def test_zeroing_one_block_of_a_packed_component_leaves_the_rest_of_the_bundle(rank, block):
    arena = make(rank=rank)
    for bundle in arena.plan.bundles:
        for component, view in components_of(arena, bundle.ordinal):
            cache = arena.cache(bundle.ordinal)
            cache.fill_(7)
            view[block] = 0
            start = bundle.component_offset(component.name, BLOCKS) + block * component.bytes_per_block
            zeroed = (cache == 0).nonzero().flatten().tolist()
            assert zeroed == list(range(start, start + component.bytes_per_block))


def test_unknown_components_are_key_errors():
    arena = make()
    assert arena.component(0, "indexer").shape == (BLOCKS, 8)
    with pytest.raises(KeyError, match="indexer"):
        arena.component(1, "indexer")  # odd layers have none
    with pytest.raises(KeyError, match="scales"):
        arena.draft("mtp.0.attn", "scales")


def test_memory_is_asked_for_once_per_owned_bundle_slot_and_draft():
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        return allocate_zeroed(nbytes)

    arena = make(layers=5, ranks=2, rank=1, allocate=allocate)
    owned = [b.bytes_per_block * BLOCKS for b in arena.plan.owned(1)]
    assert asked == [*owned, *[arena.plan.largest_bundle * BLOCKS] * 2, 40 * BLOCKS]
    assert sum(asked) == arena.nbytes


WRONG_MEMORY = {
    "too short": lambda n: torch.zeros(n - 1, dtype=torch.uint8),
    "too long": lambda n: torch.zeros(n + 1, dtype=torch.uint8),
    "another dtype": lambda n: torch.zeros(n, dtype=torch.int8),
    "another shape": lambda n: torch.zeros(1, n, dtype=torch.uint8),
    "strided": lambda n: torch.zeros(2 * n, dtype=torch.uint8)[::2],
}


@pytest.mark.parametrize("allocate", WRONG_MEMORY.values(), ids=WRONG_MEMORY)
def test_other_memory_than_asked_for_is_refused(allocate):
    with pytest.raises(LayoutError, match="expected a contiguous uint8 tensor of"):
        make(allocate=allocate)


MISALIGNED = {
    "the storage offset": lambda n: torch.zeros(n + 1, dtype=torch.uint8)[1:],
    "the address": lambda n: torch.frombuffer(bytearray(n + 16), dtype=torch.uint8, offset=4)[8 : 8 + n],
    "half a word": lambda n: torch.zeros(n + 4, dtype=torch.uint8)[4:],
}


@pytest.mark.parametrize("allocate", MISALIGNED.values(), ids=MISALIGNED)
def test_memory_that_cannot_be_viewed_as_wide_integers_is_refused(allocate):
    with pytest.raises(LayoutError, match="expected multiples of 8 for both"):
        make(allocate=allocate)


def test_control_aligned_parts_of_a_larger_storage_are_taken():
    assert make(allocate=lambda n: torch.zeros(n + 8, dtype=torch.uint8)[8:]).nbytes


def test_an_empty_stage_stores_drafts_only():
    arena = make(layers=0)
    assert arena.nbytes == 40 * BLOCKS
