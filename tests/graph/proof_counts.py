"""Print the counts of docs/graph.md: `python -m tests.graph.proof_counts [tiny|small|large]`."""

import sys

from tests.graph.proof import LARGE, SMALL, TINY, Tally, prove

HEAD = ("broken graph", "change", "mutants", "rejected", "accepted", "unsafe", "safe", "disagreements")


def table(tally: Tally) -> str:
    rows = [
        (*name, c.mutants, c.rejected, c.accepted, c.unsafe, c.safe, c.disagreements)
        for name, c in tally.counts.items()
    ]
    numbers = [row[2:] for row in rows]
    rows.append(("all", "", *(sum(column) for column in zip(*numbers, strict=True))))
    lines = [HEAD, ("---",) * 2 + ("---:",) * 6, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    sizes = {"tiny": TINY, "small": SMALL, "large": LARGE}
    print(table(prove(sizes[sys.argv[1] if sys.argv[1:] else "small"])))
