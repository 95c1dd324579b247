"""Measured costs: those of rank 0 on every rank, over every transport, with the caches of the owners untouched."""

from dataclasses import astuple
from math import isfinite

import pytest
import torch

from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import Arena, Costs, VerifyingTransport, make_streams, measure_costs
from tests.runtime_support import SENTINEL, Counting, GuardedMemory, run_group, small_specs

HOST = torch.device("cpu")


def measure(transport, *, verify=False):
    """The costs that this rank is left with, and whether its memory outside what may change is as before."""
    memory = GuardedMemory(transport)
    plan = plan_stage(small_specs(5), ranks=transport.size, staging=True)
    arena = Arena(plan, rank=transport.rank, num_blocks=33, allocate=memory)
    streams = make_streams(HOST, timeout=20)
    costs = measure_costs(
        arena=arena,
        transport=VerifyingTransport(transport) if verify else transport,
        compute=streams.compute,
        transfer=streams.transfer,
        copy=streams.copy,
        timeout=20,
    )
    owned = [arena.cache(bundle.ordinal) for bundle in plan.owned(transport.rank)]
    untouched = all(bool((cache == SENTINEL).all()) for cache in owned)
    return costs, memory.guards_intact() and untouched


def verified(transport):
    return measure(transport, verify=True)


def ranks_of(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("work", [measure, verified])
@pytest.mark.parametrize("kind", ["local", "gloo", "shared"])
def test_all_ranks_have_the_costs_of_the_first(kind, work):
    results = ranks_of(run_group(kind, 2, work))
    (costs, intact), (others, others_intact) = results
    assert costs == others
    assert intact
    assert others_intact
    assert all(isfinite(cost) and cost > 0 for cost in astuple(costs))
    assert costs.send < costs.start  # a byte, against starting a transfer


def test_three_ranks():
    results = ranks_of(run_group("local", 3, measure))
    assert len({costs for costs, _ in results}) == 1


def unheard(transport, num_blocks):
    """The costs of a cache with pages of 16 bytes, and how many transfers they took."""
    layers = [
        CacheSpec(layer=f"{i}", index=i, components=(Component(name="main", bytes_per_block=16),))
        for i in range(2)
    ]
    plan = plan_stage(layers, ranks=transport.size, staging=True)
    streams, counting = make_streams(HOST, timeout=20), Counting(transport)
    costs = measure_costs(
        arena=Arena(plan, rank=transport.rank, num_blocks=num_blocks),
        transport=counting,
        compute=streams.compute,
        transfer=streams.transfer,
        copy=streams.copy,
        timeout=20,
    )
    return costs, counting.made


@pytest.mark.parametrize("num_blocks", [1, 5, 8])
def test_a_cache_too_small_to_measure_has_the_default_costs_on_every_rank(num_blocks):
    assert ranks_of(run_group("local", 2, unheard, num_blocks)) == [(Costs(), 0)] * 2


def test_the_smallest_cache_that_is_measured():
    (costs, sent), (others, _) = ranks_of(run_group("local", 2, unheard, 17))
    assert costs == others != Costs()
    assert sent


def deaf(transport):
    """A rank whose transport carries nothing."""

    class Deaf:
        rank, size = transport.rank, transport.size

        def prepare(self, view, owner):
            return lambda: None

    return measure(Deaf())


def test_control_without_a_transfer_ranks_differ():
    results = ranks_of(run_group("local", 2, deaf))
    assert len({costs for costs, _ in results}) == 2
