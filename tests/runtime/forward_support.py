"""What the tests of a forward's hooks share: a transport without peers, and calls of hooks by name."""

import threading

LAYERS = 4
SOON = 20.0


class Alone:
    """A transport without peers: counts, and fails or dawdles where told to."""

    def __init__(self, rank=0, size=2):
        self.rank, self.size = rank, size
        self.calls = []
        self.prepared = 0
        self.error_at = {}
        self.gate = threading.Event()
        self.gate.set()

    def agree(self, token):
        self._call("agree")

    def prepare(self, view, owner):
        name = self.prepared
        self.prepared += 1
        return lambda: self._call(name)

    def _call(self, name):
        self.gate.wait(SOON)
        self.calls.append(name)
        if name in self.error_at:
            raise self.error_at[name]


def go_through(kvpp, *, history=True, layers=LAYERS):
    kvpp.begin(history=history)
    for layer in range(layers):
        kvpp.acquire(layer)
        kvpp.release(layer)
    kvpp.end()


PREFIXES = {
    "idle": "",
    "begun": "b",
    "layer 0 held": "b a0",
    "layer 0 released": "b a0 r0",
    "all released": "b a0 r0 a1 r1 a2 r2 a3 r3",
    "ended": "b a0 r0 a1 r1 a2 r2 a3 r3 e",
}


def call(kvpp, hook):
    match hook[0]:
        case "b":
            kvpp.begin(history=True)
        case "e":
            kvpp.end()
        case "a":
            kvpp.acquire(int(hook[1:]))
        case "r":
            kvpp.release(int(hook[1:]))
