"""Names that no graph may use, and hypothesis strategies for graphs with any fields it may have."""

from hypothesis import strategies as st

from kvpp_dag.graph import KVPP_GROUP, Graph, Kind, Node, Policy

HOSTILE = [
    "",
    " ",
    "a b",
    "a,b",
    "a=b",
    "a\nb",
    'a"b',
    "a\\",
    "a;b",
    "#a",
    "7",
    "a[",
    "a[x]",
    "a[-1]",
    "a[1][2]",
    "a[1]b",
    "a[\u0663]",
    "ü",
    "a\x00",
    "a" * 201,
    "a[1234567890]",
]

_WORDS = st.sampled_from(
    ["ready", "broadcast", "completion", "attend", "compute", "after", "none", "reads", "x.y/z:-1", "_"]
)
_NAMES = st.builds(
    lambda word, index: word if index is None else f"{word}[{index}]",
    _WORDS,
    st.sampled_from([None, 0, 1, 2, 999_999_999]),
)
_BUFFERS = st.lists(_NAMES, max_size=2).map(tuple)
_NUMBERS = st.sampled_from([None, 0, 1, 7, 2**63])


_GROUPS = st.lists(_NAMES.filter(lambda name: name != KVPP_GROUP), max_size=2).map(tuple)


@st.composite
def graphs(draw) -> Graph:
    ids = draw(st.lists(_NAMES, max_size=6, unique=True))
    nodes = tuple(
        Node(
            id=node_id,
            kind=kind,
            stream=draw(st.sampled_from(["compute", "transfer", "side"])),
            after=tuple(draw(st.lists(st.sampled_from(others), max_size=3))) if others else (),
            reads=draw(_BUFFERS),
            writes=draw(_BUFFERS),
            layer=draw(_NUMBERS),
            owner=draw(_NUMBERS),
            slot=draw(_NUMBERS),
            bytes=draw(_NUMBERS) or 0,
            collectives=() if kind is Kind.BROADCAST else draw(_GROUPS),
        )
        for node_id in ids
        for kind in [draw(st.sampled_from(Kind))]
        for others in [[other for other in ids if other != node_id]]
    )
    ranks = draw(st.integers(1, 64))
    return Graph(
        nodes=nodes,
        rank=draw(st.integers(0, ranks - 1)),
        ranks=ranks,
        layout_hash=draw(st.text("0aZ_.", max_size=20)),
        history=draw(st.booleans()),
        policy=draw(st.sampled_from(Policy)),
        depth=draw(st.integers(1, 9)),
    )
