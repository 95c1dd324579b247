"""`kvpp-dag check-device`, run as a user does; torch finds the test device there as it would find a vendor's."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvpp_dag import check_device
from kvpp_dag.check_device import (
    RIGHT,
    WRONG,
    Setting,
    check_devices,
    check_one_device,
    checks,
    open_device,
    processes,
    reference,
    serve_ranks,
)
from kvpp_dag.cli import check_device as command
from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime.payload import Way
from kvpp_dag.runtime.vendors import VENDORS
from tests.cli.commands import kvpp_dag
from tests.device.build import NAME, build_test_device

BLOCKS = checks.BLOCKS
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none"}


@pytest.fixture(scope="module")
def library(pytestconfig):
    return build_test_device(pytestconfig.cache.mkdir("kvpp_device"))


def on_test_device(library, *arguments):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.device.run_check_device",
            str(library),
            "check-device",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"torch {torch.__version__} finds no accelerator on this machine"),
        (["npu"], "finds no accelerator on this machine"),
        (["tpu"], "There is no kind of device 'tpu'; expected one of cuda, npu, xpu."),
    ],
)
def test_without_a_device_it_says_so_in_one_sentence_and_exits_2(monkeypatch, arguments, message):
    for name, value in NO_DEVICES.items():
        monkeypatch.setenv(name, value)
    done = kvpp_dag("check-device", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cuda"], f"torch finds no cuda on this machine, but {NAME}; check that instead."),
        (["--devices", "9"], "--devices is 9; expected 1 to 8, the devices that torch finds here."),
        (["--devices", "0"], "--devices is 0; expected 1 to 8"),
    ],
)
def test_what_is_not_there_is_refused(library, arguments, message):
    done = on_test_device(library, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_it_gives_a_verdict_and_figures_on_one_device_and_on_two(library):
    done = on_test_device(library, NAME, "--devices", "2")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith(f"device: {NAME}, 8 of them; kvpp-dag ")
    passed = [line.removeprefix("ok  ").strip() for line in lines if line.startswith("ok  ")]
    names = [*RIGHT, *WRONG]
    assert passed == [*names, *(f"2 devices, {name}" for name in names)]
    assert len(names) > 20
    assert any(line.startswith("host, per layer: ") for line in lines)
    assert lines[-1] == "verdict: right"


def test_the_packages_ways_to_send_are_all_used(device):
    """What travels is whole bundles, runs, and several chunks: the blocks of a history are not in one run."""
    served = {way: serve_ranks(device, 2, 6, BLOCKS, Setting(way=way))[0] for way in checks.WAYS}
    with_history = sum(block > 0 for block in BLOCKS)
    assert served[Way.FULL].broadcasts == 6 * with_history
    whole = served[Way.FULL].bytes // with_history // check_device.model.NUM_BLOCKS
    for way in (Way.RUNS, Way.PACKED):
        assert served[way].bytes == whole * sum(BLOCKS)
        assert served[way].broadcasts > served[Way.FULL].broadcasts
    assert served[Way.RUNS].broadcasts != served[Way.PACKED].broadcasts


def test_a_wrong_byte_and_a_control_that_changes_nothing_are_both_reported(device, monkeypatch):
    """The control of the command: one setting that must be right is broken, and one that must be wrong is not."""
    name, other = next(iter(RIGHT)), next(iter(WRONG))
    monkeypatch.setattr(checks, "RIGHT", {name: replace(RIGHT[name], skip_broadcasts=True)})
    monkeypatch.setattr(checks, "WRONG", {other: Setting()})
    assert [(check.name, check.passed) for check in check_one_device(device)] == [
        (name, False),
        (other, False),
    ]


def test_a_rank_that_raises_is_a_failed_check_with_one_line(device, monkeypatch):
    def fall_over(*_):
        raise RuntimeError("device failure: bus error\nframe #0: somewhere")

    monkeypatch.setattr(checks, "serve_ranks", fall_over)
    monkeypatch.setattr(checks, "serve_devices", fall_over)
    for check in check_one_device(device):
        assert (check.passed, check.detail) == (False, "device failure: bus error")
    (check,) = check_devices(device, 2)
    assert (check.name, check.passed, check.detail) == ("2 devices", False, "device failure: bus error")


def test_a_failed_check_is_named_in_the_verdict_and_exits_1(device, monkeypatch, capsys):
    import typer

    failed = check_device.Check(name="packed chunks", passed=False, detail="bus error")
    monkeypatch.setattr(check_device, "open_device", lambda kind: device)
    monkeypatch.setattr(check_device, "check_one_device", lambda device: [failed])
    monkeypatch.setattr(check_device, "measure", lambda device: iter([("host", "1 us")]))
    with pytest.raises(typer.Exit) as raised:
        command.check_device(None, 1)
    assert raised.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "FAIL packed chunks: bus error",
        "host: 1 us",
        "collectives between devices: not checked, on one device",
        "verdict: wrong: packed chunks",
    ]


def test_versions_are_printed_and_what_nccl_must_not_do_is_not_tried(monkeypatch, capsys):
    """Several devices with an NCCL that is refused: stood in for, since no machine here has it."""
    import typer

    from kvpp_dag import runtime
    from kvpp_dag.runtime.nccl import Found

    old = Found(nccl=(2, 20), cuda=(12, 1), driver=None, hip=None, environment={}, communicators=False)
    monkeypatch.setattr(runtime, "find_nccl", lambda: old)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    device = SimpleNamespace(torch=torch.device("cuda", 0))
    monkeypatch.setattr(check_device, "open_device", lambda kind: device)
    for name in ("check_one_device", "measure"):
        monkeypatch.setattr(check_device, name, lambda device: iter(()))
    monkeypatch.setattr(check_device, "check_devices", None)
    with pytest.raises(typer.Exit):
        command.check_device(None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["NCCL: 2.20", "CUDA: 12.1", "driver: not found"]
    assert lines[4].startswith("REFUSED: NCCL is 2.20")
    assert lines[5].startswith("warning: CUDA is 12.1")
    assert lines[-1] == "verdict: wrong: collectives between devices"


def test_a_rank_tells_nccl_before_it_makes_a_communicator(monkeypatch):
    steps = []

    def stop(*_, **__):
        steps.append("group")
        raise InterruptedError

    monkeypatch.setattr(processes, "find_accelerator", lambda: None)
    monkeypatch.setattr(processes, "prepare_nccl", lambda: steps.append("prepared"))
    monkeypatch.setattr(processes, "Device", lambda device: SimpleNamespace(torch=device))
    monkeypatch.setattr(torch.accelerator, "set_device_index", steps.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(processes.dist, "init_process_group", stop)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(InterruptedError):
        processes._serve_on_device(1, kind="cuda", count=2, store="", layers=1, blocks=(), settings=())
    assert steps == ["prepared", 1, "group"]


def test_a_device_of_no_known_kind_is_refused(device, monkeypatch):
    if not device.simulated:
        pytest.skip("this machine has a device of a known kind")
    with pytest.raises(ConfigError, match=f"device of type '{NAME}'; KVPP knows cuda, npu, xpu"):
        open_device()
    monkeypatch.setitem(VENDORS, NAME, VENDORS["xpu"])
    assert open_device(NAME).torch.type == NAME
    assert reference(open_device(), 2, (0, 1)).outputs == reference(device, 2, (0, 1)).outputs


def test_a_delay_goes_to_the_current_stream_and_never_waits_for_the_device(simulated):
    """A host that waited within a forward could wait for a peer that waits for it."""
    real = check_device.Device(simulated.torch)
    event = torch.Event(simulated.torch)
    with real.stream():
        simulated.stall()
        real.delay(0.01)
        event.record()
    assert not event.query()
    simulated.resume()
    event.synchronize()
