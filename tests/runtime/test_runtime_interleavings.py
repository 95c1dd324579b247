"""Order under every timing: streams stepped by hand in random order, with slow compute on purpose.

The compute of a layer takes two steps, between which transfers may run: it reads the layer's cache,
then looks at it again and writes new bytes. In forward n every layer must hold what forward n - 1
wrote, all the time, wherever it is stored.
"""

import random
from itertools import pairwise

import pytest

from kvpp_dag.graph import Policy
from kvpp_dag.runtime import Arena, ForwardPass, ManualStream
from tests.runtime_support import as_bytes, repeated, small_plan

BLOCKS = 2
RUNS = 40
STALE = 255


def pattern(layer, version):
    """Bytes that layer `layer` holds after forward `version` wrote it; never those of STALE."""
    return bytes([layer + 1, version + 1])


class OwnersOfAll:
    """A transport that plays the other ranks: what arrives is what their owner wrote one forward ago."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.prepared = 0
        self.sent = []

    def agree(self, token):
        """Nobody diverges."""

    def prepare(self, view, owner):
        layer, version = self.prepared, 0
        self.prepared += 1

        def broadcast():
            nonlocal version
            if owner == self.rank:
                self.sent.append((layer, version, as_bytes(view)))
            else:
                view.copy_(repeated(pattern(layer, version), view.numel()))
            version += 1

        return broadcast


class Careless(ManualStream):
    """A stream that waits for nothing: the control."""

    def wait(self, event):
        pass


class World:
    """One rank, its two streams, and a host that can run ahead of them."""

    def __init__(self, layers, *, depth=1, rank=0, policy=Policy.ON_ACQUIRE, careless=(), in_flight=2):
        self.in_flight = in_flight
        plan = small_plan(layers, 2, depth)
        self.arena = Arena(plan, rank=rank, num_blocks=BLOCKS)
        self.transport = OwnersOfAll(rank, 2)
        kinds = {
            name: Careless if name in careless else ManualStream for name in ("compute", "transfer")
        }
        self.streams = {name: kind(name) for name, kind in kinds.items()}
        self.forward = ForwardPass(
            arena=self.arena, transport=self.transport, policy=policy, timeout=0.01, **self.streams
        )
        self.violations = []
        self.finished = 0
        for layer in range(layers):
            owned = plan.owners[layer] == rank
            self.write(layer, pattern(layer, 0) if owned else bytes([STALE]))

    def write(self, layer, content):
        cache = self.arena.cache(layer)
        cache.copy_(repeated(content, cache.numel()))

    def look(self, layer, version, when):
        cache = self.arena.cache(layer)
        if as_bytes(cache) != as_bytes(repeated(pattern(layer, version), cache.numel())):
            self.violations.append(f"layer {layer} of forward {version + 1}, {when}")

    def host(self, forwards):
        """The host's part, one hook at a time; yields whether it could do anything."""
        compute = self.streams["compute"]
        for version in range(forwards):
            while self.finished <= version - self.in_flight:
                yield False
            self.forward.begin(history=True)
            yield True
            for layer in range(len(self.arena.plan.bundles)):
                self.forward.acquire(layer)
                self._attend(compute, layer, version)
                self.forward.release(layer)
                yield True
            self.forward.end()
            compute.launch(self._finish)
            yield True

    def _attend(self, compute, layer, version):
        compute.launch(lambda: self.look(layer, version, "first look"))
        compute.launch(lambda: self.look(layer, version, "second look"))
        compute.launch(lambda: self.write(layer, pattern(layer, version + 1)))

    def _finish(self):
        self.finished += 1

    def run(self, forwards, dice, weights):
        """Let host and streams take turns at random, until all is done or nothing can move."""
        host, idle = self.host(forwards), 0
        moves = {name: stream.step for name, stream in self.streams.items()}
        moves["host"] = lambda: next(host, False)
        while self.finished < forwards and idle < 1000:
            moved = moves[dice.choices(list(moves), weights)[0]]()
            idle = 0 if moved else idle + 1
        return self.violations


TIMINGS = {
    "fair": (1, 1, 1),
    "slow compute, fast broadcasts": (1, 20, 20),
    "slow broadcasts": (20, 1, 20),
    "slow host": (20, 20, 1),
    "host runs ahead": (1, 1, 50),
}
SHAPES = [(1, 1, 1), (3, 1, 1), (3, 1, 0), (5, 1, 1), (7, 2, 1), (4, 3, 0)]
"""Layers, prefetch depth, rank."""


@pytest.mark.parametrize("timing", TIMINGS.values(), ids=TIMINGS)
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("layers", "depth", "rank"), SHAPES)
def test_no_byte_changes_before_its_last_reader_lets_go(layers, depth, rank, policy, timing):
    for seed in range(RUNS // len(TIMINGS)):
        world = World(layers, depth=depth, rank=rank, policy=policy)
        assert world.run(4, random.Random(seed), timing) == [], f"seed {seed}"
        assert world.finished == 4
        assert all(stream.error is None for stream in world.streams.values())
        check_what_was_sent(world, forwards=4)


def check_what_was_sent(world, forwards):
    """The broadcast of forward n + 1 carried exactly the bytes that the owner wrote in forward n."""
    owned = [b.ordinal for b in world.arena.plan.owned(world.arena.rank)]
    assert [(layer, version) for layer, version, _ in world.transport.sent] == [
        (layer, version) for version in range(forwards) for layer in owned
    ]
    for layer, version, content in world.transport.sent:
        assert content == as_bytes(repeated(pattern(layer, version), len(content)))


def violations_without_waits_of(stream, policy):
    found = set()
    for seed in range(RUNS):
        world = World(5, rank=1, policy=policy, careless=(stream,))
        found |= set(world.run(3, random.Random(seed), (1, 3, 5)))
    return found


@pytest.mark.parametrize("policy", list(Policy))
def test_without_the_ready_event_a_slot_changes_under_its_reader(policy):
    """The control: the transfer stream does not wait for ready events."""
    assert any("second look" in v for v in violations_without_waits_of("transfer", policy))


@pytest.mark.parametrize("policy", list(Policy))
def test_without_the_completion_event_a_layer_is_read_too_early(policy):
    """The control: the compute stream does not wait for completion events."""
    assert any("first look" in v for v in violations_without_waits_of("compute", policy))


def test_the_owner_waits_before_it_writes_what_is_being_sent():
    """Without completion events, the owner's new bytes get into the broadcast of the old ones."""
    wrong = 0
    for seed in range(RUNS):
        world = World(3, rank=0, careless=("compute",))
        world.run(2, random.Random(seed), (20, 1, 20))
        for layer, version, content in world.transport.sent:
            wrong += content != as_bytes(repeated(pattern(layer, version), len(content)))
    assert wrong


class Logging(ManualStream):
    """Lists the events that are recorded."""

    def __init__(self, name, log):
        super().__init__(name)
        self.log = log

    def record(self, event):
        self.log.append(event)
        super().record(event)


def test_two_forwards_in_flight_share_no_event():
    log = []
    arena = Arena(small_plan(4, 2), rank=0, num_blocks=BLOCKS)
    streams = {name: Logging(name, log) for name in ("compute", "transfer")}
    forward = ForwardPass(arena=arena, transport=OwnersOfAll(0, 2), **streams)
    recorded = []
    for history in (True, True, False, True, True, True, False, False, True):
        log.clear()
        forward.begin(history=history)
        for layer in range(4):
            forward.acquire(layer)
            forward.release(layer)
        forward.end()
        recorded.append(set(map(id, log)))
        while streams["compute"].step() or streams["transfer"].step():
            pass
    assert max(map(len, recorded)) >= 8  # a ready and a completion event for each layer
    for first, second in pairwise(recorded):
        assert not first & second
    assert len(set().union(*recorded)) <= 4 * max(map(len, recorded))  # and they are used again
