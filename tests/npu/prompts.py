"""What the engines of these tests are asked."""

import random
from dataclasses import replace

from tests.npu.engine import BLOCK_TOKENS
from tests.support.workload import Request, together


def prompts(*lengths: int, seed: int) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 300) for _ in range(length)] for length in lengths]


def two_rounds(max_tokens: int = 8) -> list[list[Request]]:
    """Prompts of one block and of several; the second round has the first one's longest again, with another end."""
    first = prompts(40, 300, 150, 7, seed=1)
    second = [*prompts(60, 200, seed=2), first[1][: 2 * BLOCK_TOKENS] + prompts(20, seed=3)[0]]
    return [together(first, max_tokens=max_tokens), together(second, max_tokens=max_tokens)]


def coming_and_going() -> list[list[Request]]:
    """Requests that arrive while others run; one is aborted with tokens, one as soon as it has arrived.

    Most of them grow into another block, with all blocks of a small cache taken.
    """
    lengths = (120, 250, 40, 250, 380, 122, 251)
    requests = [
        Request(prompt=prompt, max_tokens=12, arrival=number)
        for number, prompt in enumerate(prompts(*lengths, seed=4))
    ]
    requests[2] = replace(requests[2], abort_after=3)
    requests[4] = replace(requests[4], abort_after=0)
    return [requests]
