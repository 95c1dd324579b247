"""The command as a user types it: what it prints, what it writes, how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

from kvpp_dag.graph import from_json, to_json, verify
from kvpp_dag.plan import preset_names
from tests.judge import fault_of


def kvpp_dag(*arguments: object, optimized: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-O"] if optimized else []), "-c"]
    program = "from kvpp_dag.cli import main; main()"
    return subprocess.run(
        [*command, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dumps") / "rank1.json"
    done = kvpp_dag("graph", "--layers", 5, "--tp", 2, "--rank", 1, "--format", "json", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def test_plan_as_json_gives_the_multiplier():
    done = kvpp_dag("plan", "--preset", "glm-5.2-lic8", "--tp", 8, "--json")
    assert json.loads(done.stdout)["capacity_multiplier"] == 6.340


def test_plan_of_two_stages():
    done = kvpp_dag("plan", "--preset", "glm-5.2-lic8", "--tp", 8, "--pp", "38,40", "--json")
    report = json.loads(done.stdout)
    assert report["capacity_multiplier"] == 5.437
    assert [stage["layers"] for stage in report["stages"]] == [38, 40]
    assert report["warning"] is None


def test_plan_for_people_names_the_layers_of_each_rank():
    done = kvpp_dag("plan", "--preset", "deepseek-v3", "--tp", 2, "--mtp")
    assert "1.824 x" in done.stdout
    assert "0-30" in done.stdout
    assert "31-60" in done.stdout


def test_plan_by_bytes_names_the_gain_over_count():
    command = ("plan", "--preset", "glm-5.2-lic8", "--tp", 8)
    by_bytes, by_count = (
        json.loads(kvpp_dag(*command, *more, "--json").stdout) for more in (["--ownership", "bytes"], [])
    )
    assert "gain_over_count" not in by_count
    assert by_count["bytes_per_token_worst_rank"] == 14604
    assert by_bytes["bytes_per_token_worst_rank"] == 14474
    gain = by_bytes["gain_over_count"]
    assert gain["blocks_per_gib"] == (1 << 30) // 14474 - (1 << 30) // 14604 == 661
    assert gain["percent"] == 0.9
    assert gain["owned_bytes_per_token_by_count"] == [
        [12040, 11910, 11780, 11910, 11780, 11910, 10628, 10628]
    ]
    text = " ".join(kvpp_dag(*command, "--ownership", "bytes").stdout.split())
    assert "by count 14,604" in text
    assert "+661 tokens per GiB" in text
    assert "+0.90 %" in text


def test_plan_that_loses_says_so():
    stages = ",".join(["3"] * 9)
    done = kvpp_dag("plan", "--preset", "deepseek-v2-lite", "--tp", 2, "--pp", stages)
    assert "do not enable it here" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("form", "start"), [("text", "# kvpp graph"), ("dot", "digraph"), ("json", "{")]
)
def test_graph_is_written_in_every_form(form, start):
    done = kvpp_dag("graph", "--layers", 5, "--tp", 2, "--rank", 1, "--format", form)
    assert done.returncode == 0
    assert done.stdout.startswith(start)
    assert "broadcast[4]" in done.stdout


def test_graph_of_a_preset():
    done = kvpp_dag(
        "graph", "--preset", "glm-5.2-lic8", "--tp", 8, "--policy", "on_release", "--depth", 2
    )
    assert "broadcast[77] owner=7 slot=2" in done.stdout


def test_graph_of_packed_blocks_is_sound(tmp_path):
    path = tmp_path / "packed.txt"
    kvpp_dag("graph", "--layers", 3, "--tp", 2, "--chunks", 2, "-o", path)
    assert "unpack.1[2] kind=copy stream=copy" in path.read_text()
    assert kvpp_dag("verify", path).returncode == 0


def test_a_sound_dump_passes(dump):
    done = kvpp_dag("verify", dump)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sound: ")


def test_dumps_of_all_ranks_pass_together_and_a_changed_owner_does_not(dump, tmp_path):
    rank0 = tmp_path / "rank0.txt"
    kvpp_dag("graph", "--layers", 5, "--tp", 2, "--rank", 0, "-o", rank0)
    assert kvpp_dag("verify", rank0, dump).returncode == 0
    rank0.write_text(rank0.read_text().replace("broadcast[3] owner=1", "broadcast[3] owner=0"))
    done = kvpp_dag("verify", rank0, dump)
    assert done.returncode == 1
    assert "collective order of ranks 0 and 1" in done.stdout


def test_dumps_whose_hosts_issue_two_groups_in_different_orders_do_not_pass(dump, tmp_path):
    """Equal broadcasts, and each dump is sound: one rank issues them behind other collectives of the engine."""
    rank0 = tmp_path / "rank0.txt"
    kvpp_dag("graph", "--layers", 5, "--tp", 2, "--rank", 0, "--policy", "on_release", "-o", rank0)
    assert kvpp_dag("verify", rank0).returncode == 0
    done = kvpp_dag("verify", rank0, dump)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "at place 1 one issues broadcast[1]" in text
    assert "the other prologue (collectives of engine)" in text


def test_verify_names_the_two_nodes_of_a_race(dump, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text(without(dump, ("completion[2]", "attend[2]")))
    done = kvpp_dag("verify", broken)
    assert done.returncode == 1
    assert "race on scratch[0] of rank 1: no path orders broadcast[2] and attend[2]." in done.stdout


def test_verify_objects_to_exactly_the_needed_edges_of_a_dump(dump):
    """Every edge in turn; a search over all executions, not `verify`, says which are needed."""
    needed = redundant = 0
    for edge in json.loads(dump.read_text())["graph"]["edges"]:
        graph = from_json(without(dump, (edge["source"], edge["target"])))
        unsafe = fault_of([[graph, graph]]) is not None
        assert bool(verify(graph)) == unsafe, edge
        needed += unsafe
        redundant += not unsafe
    assert needed > 5
    assert redundant > 5


def test_networkx_opens_a_dump(dump):
    graph = nx.node_link_graph(json.loads(dump.read_text())["graph"])
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.nodes["broadcast[3]"]["reads"] == ["persistent[3]"]


def test_an_existing_file_is_not_overwritten(dump):
    before = dump.read_text()
    done = kvpp_dag("graph", "--layers", 3, "--tp", 2, "-o", dump)
    assert done.returncode == 2
    assert "is not overwritten" in done.stderr
    assert dump.read_text() == before


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--preset", "gpt-2", "--tp", "8"], "no preset 'gpt-2'; expected one of"),
        (["plan", "--preset", "glm-5", "--tp", "0"], "0 ranks"),
        (["plan", "--preset", "glm-5", "--tp", "eight"], "--tp"),
        (["plan", "--preset", "glm-5", "--tp", "8", "--pp", "40,40"], "hold 80 layers"),
        (["plan", "--preset", "glm-5", "--tp", "8", "--pp", "a,b"], "expected layer counts"),
        (["plan", "--preset", "glm-5", "--tp", "8", "--depth", "0"], "prefetch depth is 0"),
        (["plan", "--preset", "glm-5", "--tp", "8", "--ownership", "size"], "--ownership"),
        (["plan", "--tp", "8"], "--preset"),
        (["graph", "--tp", "2"], "--layers or --preset"),
        (["graph", "--layers", "-1", "--tp", "2"], "--layers is -1"),
        (["graph", "--layers", "5", "--tp", "2", "--rank", "2"], "Rank 2"),
        (["graph", "--layers", "5", "--tp", "2", "--blocks", "-1"], "-1 blocks"),
        (["graph", "--layers", "5", "--tp", "2", "--format", "xml"], "--format"),
        (["verify", "no-such-file"], "no-such-file"),
        (["verify", "."], "."),
        (["verify"], "'files'"),
        (["frobnicate"], "frobnicate"),
        (["demo", "--out", "README.md"], "is a file"),
        (["demo", "--out", "tests"], "did not write"),
        (["demo", "--json", "README.md"], "is not overwritten"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, words, optimized):
    done = kvpp_dag(*arguments, optimized=optimized)
    assert done.returncode == 2
    assert done.stderr.startswith("kvpp-dag: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("", "Line 1"),
        ("{", "the file"),
        ('{"schema_version": 1}', "layout_hash"),
        (
            "# kvpp graph rank=0 ranks=1 layout=- history=true policy=on_acquire depth=1\nx after\n",
            "Line 2",
        ),
        ("\x00\x01", "Line 1"),
        ("hello\n", "Line 1"),
    ],
)
def test_an_unreadable_dump_is_status_2_with_the_place(tmp_path, content, place):
    path = tmp_path / "dump"
    path.write_text(content)
    done = kvpp_dag("verify", path)
    assert done.returncode == 2
    assert place in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_binary_dump_is_status_2_with_the_byte(tmp_path):
    path = tmp_path / "dump"
    path.write_bytes(b"# kvpp graph \xff\xfe")
    done = kvpp_dag("verify", path)
    assert done.returncode == 2
    assert "byte 13" in done.stderr


def test_every_preset_can_be_planned_and_version_is_printed():
    assert len(preset_names()) == 7
    assert kvpp_dag("--version").stdout.startswith("kvpp-dag ")


def without(dump: Path, edge: tuple[str, str]) -> str:
    """The dump with one edge removed from its JSON, by text alone."""
    data = json.loads(dump.read_text())
    edges = data["graph"]["edges"]
    kept = [e for e in edges if (e["source"], e["target"]) != edge]
    assert len(kept) == len(edges) - 1
    data["graph"]["edges"] = kept
    return json.dumps(data)


def test_reading_and_writing_a_dump_changes_nothing(dump):
    assert to_json(from_json(dump.read_text())) == dump.read_text()
