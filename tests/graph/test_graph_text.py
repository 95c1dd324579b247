from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Kind, Policy, from_text, to_text
from tests.builders import changed, forward, group
from tests.graph.graph_strategies import HOSTILE, graphs

HEADER = "# kvpp graph rank=0 ranks=2 layout=abc history=true policy=on_acquire depth=1"


@given(graphs())
def test_any_graph_comes_back_equal(graph):
    assert from_text(to_text(graph)) == graph


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("history", [True, False])
def test_compiled_graphs_come_back_equal(policy, history):
    for graph in group(5, 3, policy=policy, history=history, depth=2):
        assert from_text(to_text(graph)) == graph


def test_another_graph_has_another_text():
    graph = forward(3, rank=1)
    others = [
        replace(graph, rank=0),
        replace(graph, ranks=3),
        replace(graph, layout_hash=""),
        replace(graph, history=False),
        replace(graph, policy=Policy.ON_RELEASE),
        replace(graph, depth=2),
        changed(graph, "broadcast[1]", owner=1),
        changed(graph, "broadcast[1]", bytes=0),
        changed(graph, "broadcast[1]", slot=None),
        changed(graph, "broadcast[1]", after=()),
        changed(graph, "broadcast[1]", kind=Kind.COMPUTE),
        changed(graph, "broadcast[1]", stream="compute"),
        changed(graph, "broadcast[1]", layer=None),
        changed(graph, "attend[1]", reads=()),
        changed(graph, "attend[1]", writes=()),
        changed(graph, "attend[1]", collectives=()),
        changed(graph, "attend[1]", collectives=("tp", "ep")),
    ]
    texts = {to_text(other) for other in others} | {to_text(graph)}
    assert len(texts) == len(others) + 1
    assert all(from_text(to_text(other)) == other != graph for other in others)


def test_a_broadcast_reads_like_the_design_says():
    lines = to_text(forward(3, rank=0, num_blocks=131072)).splitlines()
    assert (
        "broadcast[2] owner=1 slot=0 bytes=1048576 writes=scratch[0] after ready[2],broadcast[1]"
        in lines
    )
    assert "ready[2] after attend[0]" in lines
    assert "completion[2] after broadcast[2]" in lines
    assert "prologue collectives=engine" in lines
    assert "attend[2] collectives=engine reads=scratch[0] writes=scratch[0] after completion[2]" in lines


def test_empty_lines_between_nodes_are_skipped():
    assert [n.id for n in from_text(f"{HEADER}\n\na\n\nb after a\n").nodes] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("a layer", "'layer' is not a name=value field"),
        ("a layer=", "'layer=' is not"),
        ("a layer=1 layer=1", "repeats"),
        ("a layer=x", "layer=x cannot be read"),
        ("a layer=-1", "has layer -1"),
        ("a owner=none", "owner=none cannot be read"),
        ("a bytes=-4", "has bytes -4"),
        ("a kind=magic", "kind=magic cannot be read"),
        ("a colour=red", "unknown field 'colour'"),
        ("a after", "one comma-separated list"),
        ("a after b c", "one comma-separated list"),
        ("a after first after first", "one comma-separated list"),
        ("a after gone", "'gone', which does not exist"),
        ("a after a", "comes after itself"),
        ("a after first,", "'', which does not exist"),
        ("a reads=x,,y", "uses the name ''"),
        ("first", "'first' is that of line 2 already"),
        ("7", "uses the name '7'"),
        (f"ready[{'9' * 5000}]", "uses the name"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, complaint):
    good = f"{HEADER}\nfirst\n\n{{}}\nlast"
    assert len(from_text(good.format("a")).nodes) == 3
    with pytest.raises(DumpError) as caught:
        from_text(good.format(line))
    assert str(caught.value).startswith("Line 4:")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# kvpp graph", "digraph"),
        (" depth=1", ""),
        ("depth=1", "depth=0"),
        ("depth=1", "depth=x"),
        ("rank=0", "rank=2"),
        ("history=true", "history=yes"),
        ("policy=on_acquire", "policy=never"),
        ("ranks=2", "ranks"),
        ("layout=abc", "layout=a/b"),
        ("depth=1", "depth=1 size=3"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(old, new):
    assert from_text(HEADER).nodes == ()
    assert old in HEADER
    with pytest.raises(DumpError, match=r"^Line 1\b"):
        from_text(HEADER.replace(old, new, 1))


def test_an_empty_text_is_no_graph():
    with pytest.raises(DumpError, match="Line 1"):
        from_text("")


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\n" not in name])
def test_hostile_names_do_not_come_in_by_text(name):
    with pytest.raises(DumpError, match=r"^Line \d"):
        from_text(f"{HEADER}\na stream={name}\n")


def _outcome(text):
    try:
        graph = from_text(text)
    except DumpError as error:
        return str(error)
    return "equal" if from_text(to_text(graph)) == graph else "another graph"


@given(st.text() | st.text(alphabet="ab[]=,0 \n").map(lambda text: f"{HEADER}\n{text}"))
def test_any_text_is_a_graph_or_an_error_that_names_a_line(text):
    outcome = _outcome(text)
    assert outcome == "equal" or outcome.startswith("Line ")
