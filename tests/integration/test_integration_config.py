"""The user's settings of payload, order, ownership and transport, as `--additional-config` gives them."""

import pytest

from kvpp_dag.errors import ConfigError
from kvpp_dag.graph import Policy
from kvpp_dag.plan import Ownership
from kvpp_dag.runtime import Completion, Payload
from kvpp_vllm.config import TransportKind, read_config


def read(**settings):
    return read_config({"enable_kvpp": True, "kvpp": settings})


def test_what_is_chosen_without_a_word():
    config = read()
    assert config.ownership is Ownership.COUNT
    assert config.transport is TransportKind.AUTO
    assert config.process_groups is None
    assert (config.payload, config.policy, config.depth) == (Payload.AUTO, Policy.ON_ACQUIRE, 1)


@pytest.mark.parametrize("payload", list(Payload))
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_what_is_sent_and_when_is_read(payload, policy, depth):
    config = read(payload=str(payload), policy=str(policy), depth=depth)
    assert (config.payload, config.policy, config.depth) == (payload, policy, depth)


def test_the_compute_stream_alone_waits_unless_the_host_is_to():
    assert read().completion is Completion.STREAM
    assert read(completion="host").completion is Completion.HOST


@pytest.mark.parametrize("ownership", list(Ownership))
def test_ownership_is_read(ownership):
    assert read(ownership=str(ownership)).ownership is ownership


def test_whether_it_checks_itself_is_up_to_the_device_unless_it_is_said():
    assert read().self_check is None
    assert read(self_check=True).self_check is True
    assert read(self_check=False, skip_broadcasts=True).self_check is False
    with pytest.raises(ConfigError, match="self_check and skip_broadcasts"):
        read(self_check=True, skip_broadcasts=True)


@pytest.mark.parametrize("kind", list(TransportKind))
def test_the_transport_is_read(kind):
    assert read(transport=str(kind)).transport is kind


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_number_of_process_groups_is_read(groups):
    assert read(process_groups=groups).process_groups == groups


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ownership": "size"}, "kvpp.ownership is 'size': .*'count' or 'bytes'"),
        (
            {"transport": "rdma"},
            "kvpp.transport is 'rdma': .*'auto', 'process_group' or 'shared_memory'",
        ),
        ({"payload": "used"}, "kvpp.payload is 'used': .*'full', 'active' or 'auto'"),
        ({"policy": "late"}, "kvpp.policy is 'late': .*'on_acquire' or 'on_release'"),
        ({"completion": "device"}, "kvpp.completion is 'device': .*'stream' or 'host'"),
        ({"depth": 0}, "kvpp.depth is 0: .*greater than or equal to 1"),
        ({"depth": 9}, "kvpp.depth is 9: .*less than or equal to 8"),
        ({"process_groups": 3}, "kvpp.process_groups is 3: .*1, 2 or 4"),
        (
            {"process_group": 2},
            "unknown setting 'process_group'; the settings are .*ownership, transport",
        ),
    ],
)
def test_anything_else_is_refused_with_what_is_expected(settings, words):
    with pytest.raises(ConfigError, match=words):
        read(**settings)
