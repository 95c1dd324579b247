"""What a rank keeps and writes of its forwards."""

import json
import logging

import pytest

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import LocalGroup
from kvpp_dag.trace.recording import read_recordings
from kvpp_vllm.config import read_config
from kvpp_vllm.tracing import RankTrace
from tests.runtime_support import make_engine, small_plan

RANKS = 1
LAYERS = 3


class Served:
    """A rank that runs forwards and tells its trace of them, as `KvppRank` does."""

    def __init__(self, **settings):
        config = read_config({"enable_kvpp": True, "kvpp": settings})
        self.trace = RankTrace(config, stage=0, rank=0, ranks=RANKS)
        plan = small_plan(LAYERS, RANKS)
        transport = LocalGroup(RANKS).transport(0)
        self.engine = make_engine(plan, transport, observer=self.trace.recorder)
        self.trace.start(plan, self.engine.arena.num_blocks, self.engine.forward.synchronize)

    def run(self, forwards):
        for _ in range(forwards):
            self.engine.run(1, 0)
            self.trace.ended(self.engine.forward.forwards)

    def fail(self):
        with pytest.raises(ArithmeticError) as caught:
            self.engine.run(1, 0, fail_at=1)
        self.engine.forward.abort(caught.value)
        self.trace.aborted(self.engine.forward.forwards, caught.value)


def numbers(path):
    (recording,) = read_recordings(path)
    return [forward.number for forward in recording.forwards]


def test_chosen_forwards_are_written_when_the_last_of_them_has_ended(tmp_path):
    served = Served(trace_dir=str(tmp_path), trace_forwards="3:6")
    served.run(4)
    assert list(tmp_path.iterdir()) == []
    served.run(1)
    assert numbers(tmp_path) == [3, 4, 5]
    assert {p.name for p in tmp_path.iterdir()} == {
        "recording.stage0.rank0.json",
        "trace.stage0.rank0.json",
    }
    served.run(80)
    served.trace.write()
    assert numbers(tmp_path) == [3, 4, 5]


def test_without_a_choice_the_last_forwards_are_written_when_there_are_enough_and_on_demand(tmp_path):
    served = Served(trace_dir=str(tmp_path))
    served.run(63)
    assert list(tmp_path.iterdir()) == []
    served.run(1)
    assert numbers(tmp_path) == list(range(1, 65))
    served.run(3)
    assert numbers(tmp_path) == list(range(1, 65))
    served.trace.write()
    assert numbers(tmp_path) == list(range(4, 68))


def test_a_failed_forward_is_kept_with_those_before_it(tmp_path, caplog):
    served = Served(trace_dir=str(tmp_path), trace_forwards="50:60")
    served.run(2)
    served.fail()
    (recording,) = read_recordings(tmp_path / "failed.stage0.rank0.json")
    assert [forward.error for forward in recording.forwards[:2]] == [None, None]
    assert "compute 1 fell over" in recording.forwards[2].error
    assert "failed.stage0.rank0.json" in caplog.text


def test_nothing_is_written_that_nobody_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    served = Served()
    served.run(70)
    served.fail()
    assert served.trace.write() is None
    assert list(tmp_path.iterdir()) == []
    assert len(served.trace.recorder.forwards) == 64


def test_recording_can_be_left_out():
    served = Served(record=False, log_every=1)
    served.run(2)
    served.fail()
    assert served.trace.recorder is None
    assert served.engine.forward._program.tape is None


def test_a_directory_that_cannot_be_written_is_logged_and_does_not_stop_the_serving(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    served = Served(trace_dir=str(tmp_path / "file" / "dir"))
    served.run(65)
    assert "could not write its trace" in caplog.text
    assert served.engine.forward.forwards == 65


def test_a_line_in_the_log_now_and_then(caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvpp")
    served = Served(log_every=10)
    served.run(25)
    lines = [r.getMessage() for r in caplog.records if "after" in r.getMessage()]
    assert [line.split(":")[0] for line in lines] == [
        "KVPP stage0.rank0 after 10 forwards",
        "KVPP stage0.rank0 after 20 forwards",
    ]
    caplog.clear()
    Served(log_every=0).run(25)
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trace_forwards": "1:5"}, "no trace_dir"),
        ({"trace_forwards": "5:5", "trace_dir": "/tmp/x"}, "100:105"),
        ({"trace_forwards": "9:5", "trace_dir": "/tmp/x"}, "100:105"),
        ({"trace_forwards": "1:99999999", "trace_dir": "/tmp/x"}, "10000"),
        ({"trace_forwards": "1-5", "trace_dir": "/tmp/x"}, "trace_forwards"),
        ({"trace_forwards": 64, "trace_dir": "/tmp/x"}, "trace_forwards"),
        ({"trace_dir": "/tmp/x", "record": False}, "record"),
        ({"log_every": -1}, "log_every"),
    ],
)
def test_settings_that_contradict_each_other(settings, said):
    with pytest.raises(ConfigError, match=said):
        read_config({"enable_kvpp": True, "kvpp": json.loads(json.dumps(settings))})
