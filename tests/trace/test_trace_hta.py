"""Holistic Trace Analysis itself opens what is written for it, and finds the overlap that the summary states."""

import gzip
import json
import re
from dataclasses import replace

import pytest
from hta.trace_analysis import TraceAnalysis

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Kind
from kvpp_dag.trace import Span, summarize
from kvpp_dag.trace.hta import to_hta
from tests.trace.recordings import real_recordings
from tests.trace.timelines import Timeline


@pytest.fixture(scope="module")
def real():
    return real_recordings()


@pytest.fixture
def overlap_of(tmp_path, monkeypatch):
    """The overlap in per cent that HTA finds, by rank."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    directories = iter(range(100))

    def measure(recordings, **options):
        directory = tmp_path / str(next(directories))
        directory.mkdir()
        for name, content in to_hta(recordings).items():
            (directory / name).write_bytes(content)
        analysis = TraceAnalysis(trace_dir=str(directory), **options)
        table = analysis.get_comm_comp_overlap(visualize=False)
        return dict(zip(table["rank"], table["comp_comm_overlap_pctg"], strict=True))

    return measure


def ours(recordings):
    return {r.rank: round(summarize(r.forwards).overlap_percent, 2) for r in recordings}


def with_transfers_moved(recording):
    """Each transfer of the recording ends half way, so that other parts of it lie beside compute."""

    def moved(record):
        broadcasts = {n.id for n in record.graph.nodes if n.kind is Kind.BROADCAST}
        spans = {
            node: Span(span.start, span.start + span.duration // 2) if node in broadcasts else span
            for node, span in record.spans.items()
        }
        computes = [n.id for n in record.graph.nodes if n.kind is Kind.COMPUTE][1::2]
        return replace(record, spans={n: s for n, s in spans.items() if n not in computes})

    return replace(recording, forwards=tuple(map(moved, recording.forwards)))


def test_hta_finds_our_overlap_of_a_real_dump(real, overlap_of):
    assert overlap_of(real) == ours(real)
    assert any(percent > 0 for percent in ours(real).values())


def test_a_changed_dump_gives_another_figure(real, overlap_of):
    """The control: HTA's figure follows the recording."""
    changed = [with_transfers_moved(recording) for recording in real]
    assert overlap_of(changed) == ours(changed) != ours(real)


@pytest.mark.parametrize(("transfer", "percent"), [(1, 100.0), (5, 93.33), (20, 35.83)])
def test_hta_finds_our_overlap_of_made_up_dumps(transfer, percent, overlap_of):
    recordings = Timeline(layers=6, ranks=2, transfer=transfer).recordings()
    recordings = [_slower(recording, 1000) for recording in recordings]
    assert overlap_of(recordings) == ours(recordings)
    assert ours(recordings) == {0: percent, 1: percent}


def _slower(recording, factor):
    """The same recording with times in other units, since HTA was made for microseconds."""
    forwards = tuple(
        replace(
            record,
            began=record.began * factor,
            ended=record.ended * factor,
            submitted={node: time * factor for node, time in record.submitted.items()},
            spans={n: Span(s.start * factor, s.end * factor) for n, s in record.spans.items()},
            waits={n: Span(s.start * factor, s.end * factor) for n, s in record.waits.items()},
        )
        for record in recording.forwards
    )
    return replace(recording, forwards=forwards)


def test_with_its_rounding_hta_is_off_by_what_it_rounds(real, overlap_of, monkeypatch):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "0")
    for rank, percent in overlap_of(real).items():
        summary = summarize(real[rank].forwards)
        rounded = 100 * 4000 * summary.broadcasts / summary.transfer_ns  # two ends of each, twice
        assert abs(percent - ours(real)[rank]) <= rounded


def test_hta_finds_the_forwards_as_steps(real, tmp_path, monkeypatch):
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    for name, content in to_hta(real).items():
        (tmp_path / name).write_bytes(content)
    analysis = TraceAnalysis(trace_dir=str(tmp_path), include_last_profiler_step=True)
    assert sorted(analysis.t.get_ranks()) == [0, 1]
    numbers = [record.number for record in real[0].forwards]
    assert analysis.t.get_iterations(0) == numbers


def test_files_say_which_rank_they_are(real):
    later = [replace(recording, stage=1) for recording in real]
    files = to_hta([*real, *later])
    assert list(files) == [f"rank{rank}_trace.json.gz" for rank in range(4)]
    for rank, content in enumerate(files.values()):
        text = gzip.decompress(content).decode()
        found = next(line for line in text.splitlines() if re.search(r'"rank":\s+(\d+)', line))
        assert found.strip().rstrip(",") == f'"rank": {rank}'
        assert json.loads(text)["distributedInfo"]["world_size"] == 4


def test_each_kernel_has_one_launch_no_later_than_itself(real):
    for recording, content in zip(real, to_hta(real).values(), strict=True):
        events = json.loads(gzip.decompress(content))["traceEvents"]
        launches = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
        kernels = [e for e in events if e["cat"] == "kernel"]
        assert len(kernels) == len(launches) == len({e["args"]["correlation"] for e in kernels})
        ran = [n for r in recording.forwards for n in r.spans]
        assert sorted(e["args"]["node"] for e in kernels) == sorted(
            n for n in ran if not n.startswith(("ready", "completion"))
        )
        for kernel in kernels:
            assert launches[kernel["args"]["correlation"]]["ts"] <= kernel["ts"]


def test_a_recording_without_forwards_is_refused(real):
    with pytest.raises(DumpError, match="stage 0, rank 0 holds no forwards"):
        to_hta([replace(real[0], forwards=())])
