"""What one process does: serve the same requests once per way to keep the caches."""

import random
import sys
from collections.abc import Mapping

from kvpp_dag.runtime import Transport
from tests.reference.caches import BLOCK, Caches, Kvpp, KvppCaches, PlainCaches
from tests.reference.engine import Place, Served, Topology, serve
from tests.reference.model import Config
from tests.reference.scheduler import Request, Scheduler

NUM_BLOCKS = 6
BUDGET = 160


CONTROL_FORWARDS = 2
"""A control only has to show that its first forward with history goes wrong."""


def requests(vocab: int) -> list[Request]:
    """Prompts below and above a block, some with a common head, more than the blocks hold at once."""
    generator = random.Random(3)

    def text(length: int) -> list[int]:
        return [generator.randrange(vocab) for _ in range(length)]

    head, new_head = text(BLOCK), text(BLOCK)
    prompts = {
        "long": (0, head + text(72)),
        "other": (1, text(140)),
        "shares a living head": (4, head + text(30)),
        "short": (6, text(60)),
        "shares a dead head": (30, head + text(11)),
        "takes old blocks": (31, text(170)),
        "twin": (60, new_head + text(5)),
        "shares its twin's head": (60, new_head + text(9)),
    }
    return [
        Request(name=name, tokens=prompt, prompt=len(prompt), wanted=6, arrives=arrives)
        for name, (arrives, prompt) in prompts.items()
    ]


def serve_all(
    _: Transport, topology: Topology, layout: str, ways: Mapping[str, Kvpp | None]
) -> dict[str, Served]:
    """Serve in each of `ways`; None is the plain one."""
    place = Place(topology)
    return {name: _serve(place, layout, kvpp) for name, kvpp in ways.items()}


def _serve(place: Place, layout: str, kvpp: Kvpp | None) -> Served:
    config = Config()
    specs = config.specs(place.layers, layout, last=place.last)
    caches: Caches
    if kvpp is None:
        caches = PlainCaches(specs, layout, NUM_BLOCKS)
    else:
        caches = KvppCaches(specs, layout, NUM_BLOCKS, place.transport, kvpp)
    work = requests(config.vocab)
    scheduler = Scheduler(work, NUM_BLOCKS, BUDGET)
    forwards = CONTROL_FORWARDS if kvpp and kvpp.control else sys.maxsize
    served = serve(place, config, caches, work, scheduler, forwards=forwards)
    caches.close()
    return served
