"""What of NCCL, CUDA and the environment is refused, warned of or set: tables, since no machine here has them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import nccl
from kvpp_dag.runtime.nccl import LAUNCH_ORDER, MAX_CTAS, Found, find_nccl, judge_nccl, prepare_nccl
from kvpp_dag.runtime.vendors import VENDORS, uses_nccl

GOOD = Found(nccl=(2, 27), cuda=(12, 9), driver=(13, 0), hip=None, environment={}, communicators=False)


def environment(**variables):
    return {"environment": variables}


RIGHT = {
    "nothing set": {},
    "the oldest NCCL": {"nccl": (2, 26)},
    "the oldest CUDA that overlaps": {"cuda": (12, 3), "driver": (12, 3)},
    "a later NCCL": {"nccl": (3, 0), "cuda": (14, 0)},
    "set before": environment(NCCL_LAUNCH_ORDER_IMPLICIT="1"),
    "set before the first communicator": {
        "communicators": True,
        **environment(NCCL_LAUNCH_ORDER_IMPLICIT="1"),
    },
    "many queues": environment(CUDA_DEVICE_MAX_CONNECTIONS="8"),
    "fewer thread blocks": environment(NCCL_MAX_CTAS=str(MAX_CTAS)),
    "kernels not waited for": environment(CUDA_LAUNCH_BLOCKING="0"),
}

REFUSED = {
    "ROCm": ({"hip": "6.4", "cuda": None, "driver": None}, "ROCm 6.4"),
    "torch without CUDA": ({"cuda": None}, "this torch has no NCCL"),
    "torch without NCCL": ({"nccl": None}, "this torch has no NCCL"),
    "NCCL too old": ({"nccl": (2, 25)}, "NCCL is 2.25, and only from 2.26 on"),
    "NCCL of another age": ({"nccl": (1, 99)}, "NCCL is 1.99"),
    "order turned off": (environment(NCCL_LAUNCH_ORDER_IMPLICIT="0"), "IMPLICIT is '0'"),
    "order without a value": (environment(NCCL_LAUNCH_ORDER_IMPLICIT=""), "IMPLICIT is ''"),
    "a communicator before the order": ({"communicators": True}, "was not set before"),
    "one queue": (environment(CUDA_DEVICE_MAX_CONNECTIONS="1"), "CUDA_DEVICE_MAX_CONNECTIONS is 1"),
}

WARNED = {
    "an older CUDA": ({"cuda": (12, 2)}, "CUDA is 12.2, and below 12.3"),
    "an older driver": ({"driver": (12, 0)}, "CUDA is 12.0, and below 12.3"),
    "an unknown driver": ({"driver": None}, "could not be found"),
    "more thread blocks": (environment(NCCL_MAX_CTAS="32"), "NCCL_MAX_CTAS is '32'"),
    "thread blocks that are no number": (environment(NCCL_MAX_CTAS="all"), "NCCL_MAX_CTAS is 'all'"),
    "kernels waited for": (environment(CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING is 1"),
}


@pytest.mark.parametrize("fields", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_not_remarked_on(fields):
    assert judge_nccl(replace(GOOD, **fields)) == ()


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_says_so_in_one_sentence(fields, words):
    (remark,) = judge_nccl(replace(GOOD, **fields))
    assert remark.refused
    assert words in remark.message
    assert not remark.message.endswith(".")


@pytest.mark.parametrize(("fields", "words"), WARNED.values(), ids=WARNED)
def test_what_is_only_slower_is_warned_of(fields, words):
    (remark,) = judge_nccl(replace(GOOD, **fields))
    assert not remark.refused
    assert words in remark.message


def test_refusals_come_first_and_all_are_told():
    bad = replace(
        GOOD,
        nccl=(2, 20),
        cuda=(12, 1),
        **environment(CUDA_DEVICE_MAX_CONNECTIONS="1", NCCL_LAUNCH_ORDER_IMPLICIT="0"),
    )
    assert [remark.refused for remark in judge_nccl(bad)] == [True, True, True, False]


@pytest.mark.parametrize("before", [{}, {LAUNCH_ORDER: "1"}])
def test_preparing_sets_the_order_and_nothing_else(monkeypatch, before):
    monkeypatch.setattr(nccl, "find_nccl", lambda env: replace(GOOD, environment=env))
    variables = before | {"OTHER": "kept"}
    assert prepare_nccl(variables) == ()
    assert variables == {LAUNCH_ORDER: "1", "OTHER": "kept"}


def test_preparing_returns_the_warnings(monkeypatch):
    monkeypatch.setattr(nccl, "find_nccl", lambda env: replace(GOOD, cuda=(12, 1)))
    (warning,) = prepare_nccl({})
    assert "CUDA is 12.1" in warning


def test_preparing_raises_what_is_refused_and_sets_nothing(monkeypatch):
    monkeypatch.setattr(nccl, "find_nccl", lambda env: replace(GOOD, communicators=True))
    variables = {}
    with pytest.raises(ConfigError, match=r"^KVPP cannot send over NCCL here: torch has made .*\.$"):
        prepare_nccl(variables)
    assert variables == {}


def test_what_this_machine_has_is_found():
    """A build of torch for CPUs here; on a machine with CUDA the figures are that machine's."""
    found = find_nccl({LAUNCH_ORDER: "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PATH": "no concern"})
    assert found.environment == {LAUNCH_ORDER: "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert (found.cuda is None) == (torch.version.cuda is None)
    assert found.hip == torch.version.hip
    assert found.communicators is False
    if found.cuda is None:
        assert any("this torch has no NCCL" in remark.message for remark in judge_nccl(found))


@pytest.mark.parametrize(
    ("version", "loaded", "backends", "expected"),
    [
        ((2, 27, 3), True, "cpu:gloo,cuda:nccl", ((2, 27), True)),
        ((2, 27, 3), True, "cpu:gloo", ((2, 27), False)),
        ((2, 26, 2, "rc"), False, None, ((2, 26), False)),
    ],
)
def test_a_process_group_of_nccl_is_noticed(monkeypatch, version, loaded, backends, expected):
    """torch with NCCL stood in for: its answers, in the shapes in which it gives them."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(dist, "is_initialized", lambda: loaded)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    found = find_nccl({})
    assert (found.nccl, found.communicators) == expected


def test_the_group_has_few_thread_blocks(monkeypatch):
    made = SimpleNamespace(config=SimpleNamespace(max_ctas=32))
    stand_in = SimpleNamespace(Options=lambda: made)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    assert nccl.nccl_options() is made
    assert made.config.max_ctas == MAX_CTAS


def test_only_collectives_of_nccl_are_concerned():
    assert [kind for kind in ("cpu", *VENDORS, "other") if uses_nccl(kind)] == ["cuda"]
