"""The user's settings of ownership and transport, as `--additional-config` gives them."""

import pytest

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import Ownership
from kvpp_vllm.config import TransportKind, read_config


def read(**settings):
    return read_config({"enable_kvpp": True, "kvpp": settings})


def test_without_a_word_layers_are_counted_and_the_transport_is_chosen():
    config = read()
    assert config.ownership is Ownership.COUNT
    assert config.transport is TransportKind.AUTO
    assert config.process_groups == 2


@pytest.mark.parametrize("ownership", list(Ownership))
def test_ownership_is_read(ownership):
    assert read(ownership=str(ownership)).ownership is ownership


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
