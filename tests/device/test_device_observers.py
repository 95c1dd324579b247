"""Observers of a device that went wrong: what they cannot learn is missing, and never an error of theirs."""

import logging

import pytest
import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.graph import COMPUTE_STREAM
from kvpp_dag.runtime import LocalGroup
from kvpp_dag.trace import Recorder, Recording, analyze, summarize, to_chrome
from kvpp_dag.trace.explanation import explain
from kvpp_dag.trace.recording import from_recording_json, to_recording_json
from tests.device.ranks import DeviceEngine, Setting, one_rank
from tests.runtime_support import small_plan

LAYERS = 4


def tell(recorder):
    """All that is made of a recording, and what is said to be unknown."""
    recording = Recording(
        rank=0, ranks=2, stage=0, clock="c", num_blocks=5, plan=None, forwards=recorder.forwards
    )
    read = from_recording_json(to_recording_json(recording))
    analyze([read])
    to_chrome([read])
    summarize(read.forwards)
    return explain([read]).unknown


def test_without_compute_s_waits_the_run_goes_on_and_the_times_are_missing(simulated):
    """The device begins a forward while transfers of the one before are still on their way."""
    recorder = Recorder()
    engine = one_rank(
        simulated, observer=lambda rank: recorder, dropped=COMPUTE_STREAM, transfer_delay=0.02
    )
    for token, block in enumerate((1, 1, 1, 1)):
        engine.run(token, block)
    forwards = recorder.forwards
    torch.accelerator.synchronize()
    assert [forward.number for forward in forwards] == [1, 2, 3, 4]
    assert forwards[0].missing > 0
    for forward in forwards:
        for node in forward.spans:
            assert forward.spans[node].start <= forward.spans[node].end <= forward.ended
    (said,) = [sentence for sentence in tell(recorder) if "did not tell" in sentence]
    assert "forward 1" in said


def test_control_with_the_waits_nothing_is_missing(simulated):
    recorder = Recorder()
    engine = one_rank(simulated, observer=lambda rank: recorder, transfer_delay=0.02)
    for token, block in enumerate((1, 1, 1)):
        engine.run(token, block)
    torch.accelerator.synchronize()
    assert [forward.missing for forward in recorder.forwards] == [0, 0, 0]
    assert not [sentence for sentence in tell(recorder) if "did not tell" in sentence]


def test_a_device_that_fails_is_the_run_s_error_and_its_times_are_missing(simulated):
    recorder = Recorder()
    engine = one_rank(simulated, observer=lambda rank: recorder)
    engine.run(0, 1)
    torch.accelerator.synchronize()
    with engine.compute_stream:
        torch.ops.kvpp_device.fail("link down")
    engine.run(1, 1)
    with pytest.raises(TransferError, match="link down"):
        engine.forward.synchronize()
    with pytest.raises(TransferError, match="link down"):
        engine.run(2, 1)
    second = recorder.forwards[1]
    assert second.missing > 0
    assert tell(recorder)


class Failing(Recorder):
    """An observer that breaks down in its third forward."""

    def forward_began(self, tape, number, needed_blocks, sent_blocks):
        if number == 3:
            raise ValueError("I have seen enough")
        super().forward_began(tape, number, needed_blocks, sent_blocks)


def test_an_observer_that_raises_is_logged_once_and_told_nothing_more(device, caplog):
    observer = Failing()
    plan = small_plan(LAYERS, 1)
    engine = DeviceEngine(
        device, plan, LocalGroup(1).transport(0), Setting(observer=lambda rank: observer)
    )
    plain = DeviceEngine(device, plan, LocalGroup(1).transport(0), Setting())
    blocks = (0, 1, 2, 3, 1, 2)
    with caplog.at_level(logging.ERROR, "kvpp_dag"):
        for token, block in enumerate(blocks):
            engine.run(token, block)
            plain.run(token, block)
    assert engine.results(len(blocks)) == plain.results(len(blocks))
    assert [forward.number for forward in observer.forwards] == [1, 2]
    (logged,) = [r for r in caplog.records if r.name == "kvpp_dag"]
    assert "Failing raised when it was told that forward 3 began" in logged.getMessage()
    assert "I have seen enough" in logged.exc_text
