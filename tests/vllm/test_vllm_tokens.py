"""Same prompts, same memory: KVPP on gives the tokens of KVPP off, in more blocks; the control does not."""

import json
from pathlib import Path

import pytest

from kvpp_dag.graph import from_json, from_text, verify_group
from kvpp_dag.trace import analyze
from kvpp_dag.trace.files import read_dump
from kvpp_dag.trace.recording import read_recordings
from tests.support.vllm_cpu import EngineResult, EngineSpec, run_engine
from tests.vllm.conftest import LAYERS

TOKENS = 16
ON = {"enable_kvpp": True}
CONTROL = {"enable_kvpp": True, "kvpp": {"skip_broadcasts": True}}


@pytest.fixture(scope="module")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def off(checkpoint, prompts) -> EngineResult:
    return finished(EngineSpec(model=checkpoint, rounds=[prompts], max_tokens=TOKENS))


@pytest.fixture(scope="module")
def on(checkpoint, prompts, trace_dir) -> EngineResult:
    config = {"enable_kvpp": True, "kvpp": {"trace_dir": str(trace_dir)}}
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=TOKENS,
            engine={"additional_config": config},
            rpc=["kvpp_stats", "kvpp_write_trace"],
        )
    )


@pytest.fixture(scope="module")
def control(checkpoint, prompts) -> EngineResult:
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=TOKENS,
            engine={"additional_config": CONTROL},
        )
    )


def finished(spec: EngineSpec) -> EngineResult:
    result = run_engine(spec, timeout_s=280)
    assert result.error is None, f"{result.error}\n{result.log[-6000:]}"
    return result


def test_eight_concurrent_requests_give_the_same_tokens(off, on):
    assert on.tokens == off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(off, control):
    pairs = zip(control.tokens[0], off.tokens[0], strict=True)
    assert all(left != right for left, right in pairs)


def test_the_same_memory_holds_as_many_more_blocks_as_planned(off, on):
    stats = on.rpc["kvpp_stats"][0]
    assert stats["blocks_without_kvpp"] == off.num_blocks
    assert stats["capacity_multiplier"] == LAYERS / (LAYERS / 2 + 2)
    assert on.num_blocks == int(off.num_blocks * stats["capacity_multiplier"]) or on.num_blocks == int(
        off.num_blocks * stats["capacity_multiplier"] + 1
    )
    page_bytes = 16 * 576 * 4
    for rank in on.rpc["kvpp_stats"]:
        assert rank["kv_bytes"] == on.num_blocks * page_bytes * (LAYERS // 2 + 2)


def test_ranks_own_contiguous_halves(on):
    owned = [rank["layers_owned"] for rank in on.rpc["kvpp_stats"]]
    assert [len(layers) for layers in owned] == [LAYERS // 2, LAYERS // 2]
    assert owned[0][0].startswith("model.layers.0.")
    assert owned[1][-1].startswith(f"model.layers.{LAYERS - 1}.")


def test_figures_follow_the_forwards_with_history(on):
    for rank in on.rpc["kvpp_stats"]:
        # One prefill of all prompts without history, then a decode per further token.
        assert rank["forwards_with_history"] >= TOKENS - 1
        assert rank["forwards"] > rank["forwards_with_history"]
        assert rank["broadcasts"] == LAYERS * rank["forwards_with_history"]
        bundle = rank["blocks"] * 16 * 576 * 4
        assert rank["bytes_broadcast"] == rank["broadcasts"] * bundle


def test_each_rank_logs_one_line_at_start(on):
    lines = [line for line in on.log.splitlines() if "blocks with KVPP" in line]
    assert len(lines) == 2
    assert f"{on.num_blocks} blocks with KVPP" in lines[0]
    assert f"{on.rpc['kvpp_stats'][0]['blocks_without_kvpp']} without" in lines[0]


def test_dumps_of_both_ranks_are_sound_and_agree(on, trace_dir):
    dumps = [trace_dir / f"graph.stage0.rank{rank}.history.json" for rank in (0, 1)]
    graphs = [from_json(read_dump(path)) for path in dumps]
    assert verify_group(graphs) == ()
    texts = [from_text(read_dump(path.with_suffix(".txt"))) for path in dumps]
    assert texts == graphs
    assert graphs[0] != graphs[1]


def test_traces_show_every_broadcast_with_its_arrow(on, trace_dir):
    for rank in (0, 1):
        events = json.loads((trace_dir / f"trace.stage0.rank{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        broadcasts = [e for e in events if e["ph"] == "X" and e["cat"] == "broadcast"]
        arrows = [e for e in events if e["ph"] == "f"]
        assert len(broadcasts) == on.rpc["kvpp_stats"][rank]["broadcasts"]
        assert len(arrows) == len(broadcasts)


def test_recordings_say_what_was_sent_and_what_the_batches_needed(on, trace_dir):
    assert [Path(path).parent for path in on.rpc["kvpp_write_trace"]] == [trace_dir, trace_dir]
    recordings = read_recordings(trace_dir)
    assert [recording.rank for recording in recordings] == [0, 1]
    for recording, analysed in zip(recordings, analyze(recordings), strict=True):
        stats = on.rpc["kvpp_stats"][recording.rank]
        assert len(recording.forwards) == stats["forwards"]
        assert sum(forward.bytes for forward in analysed) == stats["bytes_broadcast"]
        needed = [f.needed_blocks for f in recording.forwards if f.graph.history]
        assert all(0 < blocks < recording.num_blocks for blocks in needed)


def test_off_is_the_default_and_leaves_no_trace_of_kvpp(off):
    assert "KVPP" not in off.log
