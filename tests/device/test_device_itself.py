"""The test device: it runs what it is given later, in order, and punishes what would go wrong on a real one."""

import os

import pytest
import torch

from tests.device.build import native

POISON = 0xCD


@pytest.fixture
def stream(simulated):
    with simulated.stream() as made:
        yield made


def held(simulated):
    """Nothing of the current stream runs until `resume`; returns an event that is not reached before."""
    event = torch.Event(simulated.torch)
    simulated.stall()
    event.record()
    return event


def test_operators_with_new_results_are_queued(simulated, stream):
    x = torch.arange(6.0).to(simulated.torch)
    before = held(simulated)
    x.add_(1)
    found = torch.nn.functional.softmax(x.view(2, 3) @ x.view(3, 2), dim=-1)
    assert found.device.type == simulated.torch.type
    assert not before.query()
    simulated.resume()
    y = torch.arange(6.0) + 1
    expected = torch.nn.functional.softmax(y.view(2, 3) @ y.view(3, 2), dim=-1)
    assert torch.equal(found.cpu(), expected)


def test_shapes_that_depend_on_data_wait_for_the_stream(simulated, stream):
    x = torch.zeros(4, device=simulated.torch)
    simulated.delay(0.05)
    x[1:3].fill_(1)
    assert torch.nonzero(x).cpu().tolist() == [[1], [2]]
    assert x.any().item()


def test_the_host_s_numbers_are_read_at_submission_and_pinned_memory_later(simulated, stream):
    pageable, pinned = torch.ones(3), torch.ones(3, pin_memory=True)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    found = [torch.zeros(3, device=simulated.torch) for _ in range(3)]
    held(simulated)
    found[0].copy_(pageable, non_blocking=True)
    found[1].copy_(pinned, non_blocking=True)
    torch.add(found[2], pageable.sum(), out=found[2])
    pageable.fill_(7)
    pinned.fill_(7)
    simulated.resume()
    assert [x.cpu().tolist() for x in found] == [[1.0] * 3, [7.0] * 3, [3.0] * 3]


def test_a_copy_to_pageable_memory_has_been_made_when_it_returns(simulated, stream):
    x = torch.ones(3, device=simulated.torch)
    simulated.delay(0.02)
    x.add_(1)
    pageable = torch.zeros(3).copy_(x, non_blocking=True)
    assert pageable.tolist() == [2.0] * 3


@pytest.mark.parametrize("named", [False, True])
def test_freed_memory_is_poisoned_unless_another_stream_was_named(simulated, stream, named):
    """The reader is late. Without record_stream it finds what the owner's stream made of the memory."""
    x = torch.ones(8, dtype=torch.uint8, device=simulated.torch)
    found = torch.zeros(8, dtype=torch.uint8, device=simulated.torch)
    stream.synchronize()
    reader = simulated.stream()
    with reader:
        simulated.stall()
        found.copy_(x)
    if named:
        x.record_stream(reader)
    del x
    free = torch.Event(simulated.torch)
    free.record()
    if not named:
        free.synchronize()
    simulated.resume()
    with reader:
        assert found.cpu().tolist() == [1 if named else POISON] * 8


def test_freed_memory_keeps_its_content_for_work_submitted_before(simulated, stream):
    x = torch.ones(8, device=simulated.torch)
    simulated.delay(0.02)
    y = x * 2
    del x
    assert y.cpu().tolist() == [2.0] * 8


def test_fresh_memory_is_poisoned(simulated):
    assert torch.empty(4, dtype=torch.uint8, device=simulated.torch).cpu().tolist() == [POISON] * 4


def test_memory_is_counted_and_ends(simulated):
    free, total = torch.accelerator.get_memory_info(simulated.torch)
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=simulated.torch)
    assert torch.accelerator.get_memory_info(simulated.torch) == (free - kept.nbytes, total)
    assert torch.accelerator.memory_stats(simulated.torch)["allocated_bytes.all.peak"] >= kept.nbytes
    with pytest.raises(torch.OutOfMemoryError, match=r"no .* bytes left"):
        torch.empty(total, dtype=torch.uint8, device=simulated.torch)


def test_an_operator_of_all_backends_runs_in_order_once_it_is_claimed(simulated, stream):
    """Unclaimed it reads device memory at once, as those of vLLM's CPU build would."""
    library = torch.library.Library("kvpp_test", "DEF")
    for name in ("unclaimed", "claimed"):
        library.define(f"{name}(Tensor(a!) x) -> ()")
        library.impl(name, _triple, "CompositeImplicitAutograd")
    native().claim("kvpp_test", "claimed")
    results = {}
    for name in ("unclaimed", "claimed"):
        x = torch.zeros(1, device=simulated.torch)
        stream.synchronize()
        held(simulated)
        x.add_(1)
        getattr(torch.ops.kvpp_test, name)(x)
        simulated.resume()
        results[name] = x.cpu().item()
    assert results == {"unclaimed": 1.0, "claimed": 3.0}


def _triple(x):
    memory = torch.ops.kvpp_device.host(x) if x.device.type != "cpu" else x
    memory.mul_(3)


def test_a_process_forked_after_the_first_use_is_told(simulated, stream):
    torch.zeros(1, device=simulated.torch)
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device=simulated.torch)
        except RuntimeError as error:
            os._exit(17 if "before this process was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
