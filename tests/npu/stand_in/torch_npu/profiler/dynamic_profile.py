"""The profiler that an engine may start while it runs: never."""


def step() -> None:
    pass
