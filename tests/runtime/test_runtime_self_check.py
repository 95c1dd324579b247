"""The self check on streams of the host, over every transport; where it is only run if it is asked for."""

import pytest
import torch

from kvpp_dag.errors import DivergenceError, SelfCheckError
from kvpp_dag.graph import Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import (
    Arena,
    Costs,
    ForwardPass,
    Payload,
    VerifyingTransport,
    check_forwards,
    make_streams,
    measure_costs,
)
from kvpp_dag.runtime import bind as binding
from kvpp_dag.trace import Recorder
from tests.runtime_support import run_group, small_specs

HOST = torch.device("cpu")
TIMEOUT = 20.0


def odd_specs():
    """Layers whose pages can only be moved as single bytes."""
    parts = (Component(name="main", bytes_per_block=37), Component(name="scale", bytes_per_block=5))
    return [CacheSpec(layer=f"{i}", index=i, components=parts) for i in range(6)]


def check(
    transport,
    specs=None,
    payload=Payload.AUTO,
    policy=Policy.ON_ACQUIRE,
    skip_broadcasts=False,
    measure=False,
    observer=None,
):
    """What a rank says of itself, and whether its memory is zero again and its counts are."""
    plan = plan_stage(specs or small_specs(5), ranks=transport.size, staging=payload is not Payload.FULL)
    allocate = getattr(getattr(transport, "inner", transport), "allocate", None)
    arena = Arena(
        plan, rank=transport.rank, num_blocks=64, **({"allocate": allocate} if allocate else {})
    )
    streams = make_streams(HOST, timeout=TIMEOUT)
    costs = None
    if measure:
        costs = measure_costs(
            arena=arena,
            transport=transport,
            compute=streams.compute,
            transfer=streams.transfer,
            copy=streams.copy,
            timeout=TIMEOUT,
        )
    forward = ForwardPass(
        arena=arena,
        transport=transport,
        compute=streams.compute,
        transfer=streams.transfer,
        copy=streams.copy,
        policy=policy,
        payload=payload,
        costs=costs or Costs(),
        observer=observer,
        skip_broadcasts=skip_broadcasts,
        timeout=TIMEOUT,
    )
    checked = check_forwards(forward, arena=arena, transport=transport, streams=streams, timeout=TIMEOUT)
    zero = not any(bool(tensor.any()) for tensor in arena._tensors())
    return checked.forwards, zero, forward.forwards + forward.broadcasts_sent + forward.bytes_sent


def verified(transport):
    return check(VerifyingTransport(transport), measure=True)


def recorded(transport):
    recorder = Recorder()
    result = check(transport, observer=recorder, policy=Policy.ON_RELEASE)
    assert recorder.forwards == ()
    return result


def of_single_bytes(transport):
    return check(transport, odd_specs())


def whole(transport):
    return check(transport, payload=Payload.FULL)


def nothing_sent(transport):
    return check(transport, skip_broadcasts=True)


def passed(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
        forwards, zero, counts = result
        assert forwards >= 15
        assert (zero, counts) == (True, 0)


@pytest.mark.parametrize("kind", ["local", "gloo", "shared"])
@pytest.mark.parametrize("work", [verified, recorded, of_single_bytes, whole])
def test_it_passes_and_leaves_everything_as_it_was(kind, work):
    passed(run_group(kind, 2, work))


@pytest.mark.parametrize("kind", ["local", "gloo", "shared"])
def test_with_nothing_sent_every_rank_refuses(kind):
    for result in run_group(kind, 2, nothing_sent):
        assert isinstance(result, SelfCheckError)
        assert "in a forward of the way 'full'. The first wrong block is 0 of 'main'" in str(result)


def test_where_compute_does_not_wait_every_rank_refuses(monkeypatch):
    """Compute runs so far ahead that the ranks may already differ over which forward this is."""
    waiting = binding._HeldBinder._wait_on_compute

    def dropped(self, event):
        waiting(self, event)
        self.steps[-1] = lambda: None

    monkeypatch.setattr(binding._HeldBinder, "_wait_on_compute", dropped)
    for result in run_group("local", 2, whole):
        assert isinstance(result, SelfCheckError | DivergenceError), result
