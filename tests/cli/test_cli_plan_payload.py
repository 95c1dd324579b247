"""`kvpp-dag plan --payload`: staging halves are counted where the engine's payload has them."""

import json
from typing import get_args

import pytest

from kvpp_dag.cli.plans import Payload
from kvpp_dag.runtime import Payload as RuntimePayload
from tests.cli.commands import kvpp_dag

GLM = ("plan", "--preset", "glm-5.2-lic8", "--tp", 8)
FOUR_LAYERS = ("plan", "--preset", "deepseek-v2-lite", "--tp", 2, "--pp", "3,4,4,4,4,4,4")


def report(*arguments):
    return json.loads(kvpp_dag(*arguments, "--json").stdout)


def test_the_payloads_are_those_of_the_runtime():
    assert get_args(Payload) == tuple(RuntimePayload)


@pytest.mark.parametrize(
    ("payload", "multiplier", "staging"),
    [("full", 6.340, 0), ("active", 6.271, 160.25), ("auto", 6.271, 160.25)],
)
def test_the_payload_decides_whether_there_is_staging(payload, multiplier, staging):
    found = report(*GLM, "--payload", payload)
    assert found["payload"] == payload
    assert found["capacity_multiplier"] == multiplier
    assert found["bytes_per_token_worst_rank"] == 14604 + staging
    assert found["stages"][0]["staging_bytes_per_token"] == staging
    assert found["stages"][0]["ranks"][0]["physical_bytes_per_token"] == 14604 + staging
    text = kvpp_dag(*GLM, "--payload", payload).stdout
    assert f"payload {payload}: {multiplier:.3f} x" in text
    assert f"{14604 + staging:,}" in text


def test_full_is_the_default_and_whole_bundles_cost_whole_bytes():
    assert report(*GLM) == report(*GLM, "--payload", "full")
    assert ".0" not in kvpp_dag(*GLM, "--json").stdout


def test_by_bytes_compares_plans_of_the_same_payload():
    gain = report(*GLM, "--ownership", "bytes", "--payload", "auto")["gain_over_count"]
    assert gain["bytes_per_token_worst_rank_by_count"] == 14764.25
    assert gain["bytes_per_token_worst_rank_by_bytes"] == 14634.25
    # Rounding of the halves to whole blocks takes none or one off the quotients.
    assert 0 <= (1 << 30) // 14764.25 - gain["blocks_per_gib_by_count"] <= 1
    assert 0 <= (1 << 30) // 14634.25 - gain["blocks_per_gib_by_bytes"] <= 1


def test_a_loss_by_staging_advises_payload_full():
    assert report(*FOUR_LAYERS)["warning"] is None
    assert report(*FOUR_LAYERS)["capacity_multiplier"] == 1.0
    found = report(*FOUR_LAYERS, "--payload", "auto")
    assert found["capacity_multiplier"] == 0.970
    assert "set the payload to full" in found["warning"]
    assert "4,752 bytes, without it 4,608" in found["warning"]
    assert "do not enable" not in found["warning"]


def test_a_loss_by_slots_advises_against_kvpp_with_any_payload():
    command = (*FOUR_LAYERS, "--depth", 2)
    for payload in ("full", "auto"):
        warning = report(*command, "--payload", payload)["warning"]
        assert "do not enable it here" in warning
        assert "payload" not in warning


def test_another_payload_is_refused():
    done = kvpp_dag(*GLM, "--payload", "none")
    assert done.returncode == 2
    assert "'full', 'active', 'auto'" in done.stderr
