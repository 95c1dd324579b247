"""Draft layers come from the engine's own record of them, and nothing is guessed where it keeps none."""

from types import SimpleNamespace

import pytest

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.runners import V1


def drafter(**attributes):
    from vllm.v1.spec_decode.eagle import EagleProposer

    made = object.__new__(EagleProposer)  # what MTP uses; its constructor wants a whole engine
    vars(made).update(attributes)
    return SimpleNamespace(drafter=made)


def test_the_record_is_taken_as_it_is():
    layers = {"model.layers.0.odd", "no_index_at_all"}
    assert V1.draft_layers(drafter(_draft_attn_layer_names=layers)) == layers


def test_without_a_speculator_there_are_no_draft_layers():
    assert V1.draft_layers(SimpleNamespace()) == frozenset()


def test_a_speculator_without_the_record_is_an_error_that_names_it():
    with pytest.raises(NotActiveError, match=r"EagleProposer .* no _draft_attn_layer_names"):
        V1.draft_layers(drafter())
