"""What the demo takes from the installed vLLM's platform; on accelerators its engines have not been run yet."""

import importlib.metadata
from pathlib import Path

import pytest

from kvpp_dag.errors import ConfigError
from kvpp_vllm.demo import platform as demo_platform
from kvpp_vllm.demo import run
from kvpp_vllm.demo.engine import engine_arguments, environment
from kvpp_vllm.demo.platform import Platform, check_platform, installed_platform

FOR_CPUS = ("VLLM_CPU_OMP_THREADS_BIND", "TORCH_COMPILE_DISABLE")


def platform(device_type, devices=2):
    return Platform(device_type=device_type, devices=devices, version="0.32.0")


def test_the_installed_vllm_says_what_it_runs_on():
    found = installed_platform(ranks=2)
    assert (found.device_type, found.devices) == ("cpu", 0)
    assert importlib.metadata.version("vllm-cpu").startswith(found.version.partition("+")[0])


@pytest.mark.parametrize("device_type", ["cuda", "npu", "xpu"])
def test_an_accelerator_gets_no_setting_that_is_for_cpus(device_type):
    variables = environment(ranks=2, device_type=device_type)
    arguments = engine_arguments(Path("model"), ranks=2, device_type=device_type)
    assert not set(FOR_CPUS) & set(variables)
    assert "block_size" not in arguments
    assert arguments["dtype"] == "bfloat16"
    on_cpu = environment(ranks=2)
    assert set(FOR_CPUS) <= set(on_cpu)
    assert engine_arguments(Path("model"), ranks=2)["block_size"] == 16
    assert set(on_cpu) - set(variables) == set(FOR_CPUS)


def test_what_kvpp_refuses_on_cuda_is_turned_off_there_alone():
    name = "VLLM_ALLREDUCE_USE_FLASHINFER"
    assert environment(ranks=2, device_type="cuda")[name] == "0"
    assert name not in environment(ranks=2, device_type="npu")


@pytest.mark.parametrize("found", [platform("cpu", 0), platform("cuda", 2), platform("npu", 8)])
def test_enough_devices(found):
    check_platform(found, ranks=2)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (platform("cuda", 1), "finds 1 of type cuda; run it where there are 2, or with vllm-cpu."),
        (platform("", 0), "The installed vLLM 0.32.0 finds no device that it can run on"),
    ],
)
def test_too_few_devices_are_refused_in_one_sentence(found, message):
    with pytest.raises(ConfigError) as raised:
        check_platform(found, ranks=2)
    assert message in str(raised.value)


def test_a_vllm_that_cannot_say_is_refused(monkeypatch):
    monkeypatch.setattr(demo_platform.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="cannot say what it runs on: it says nothing"):
        installed_platform(ranks=2)


def test_nothing_is_written_where_there_are_too_few_devices(tmp_path, monkeypatch):
    def refuse(*, ranks):
        check_platform(platform("cuda", 1), ranks=ranks)

    monkeypatch.setattr(run, "installed_platform", refuse)
    with pytest.raises(ConfigError):
        run.run_demo(tmp_path / "demo", lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_the_engines_get_the_settings_of_the_platform(tmp_path, monkeypatch):
    """Each run's specification names it, and its process the environment; no engine is started."""
    started = []

    def popen(command, *, env, **_):
        started.append((Path(command[3]).read_text(encoding="utf-8"), env))
        raise InterruptedError

    monkeypatch.setattr(run, "installed_platform", lambda *, ranks: platform("xpu"))
    monkeypatch.setattr(run.subprocess, "Popen", popen)
    phases = []
    for name in FOR_CPUS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InterruptedError):
        run.run_demo(tmp_path / "demo", lambda name, phase: phases.append((name, phase)))
    ((spec, env),) = started
    assert '"device_type": "xpu"' in spec
    assert not set(FOR_CPUS) & set(env)
    assert ("platform", "xpu, vLLM 0.32.0") in phases
