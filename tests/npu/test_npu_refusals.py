"""What is refused under vllm-ascend, on its own configuration: one sentence each, and nothing is started."""

import pytest

from tests.npu.engine import OWN_KVPP, RELEASED, Engine, run_engines

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]

ON = {"enable_kvpp": True}


def refused(models, library, cases, **named) -> dict[str, str]:
    """The error of each case: arguments of `vllm.LLM`, additional_config."""
    engines = [
        Engine(model=models["dense"], rounds=[], arguments=arguments, additional=additional)
        for arguments, additional in cases.values()
    ]
    found = run_engines(engines, library=library, **named)
    return {name: one.error or "" for name, one in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def released(models, library):
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    cases = {
        "unknown setting": ({}, ON | {"kvpp": {"no_such": 1}}),
        "full graphs": (graphs, ON),
        "context parallelism": ({"decode_context_parallel_size": 2}, ON),
    }
    return refused(models, library, cases)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown setting", "additional_config.kvpp has the unknown setting 'no_such'"),
        ("full graphs", "cudagraph_mode FULL_DECODE_ONLY replays attention without the per-layer hook"),
        ("context parallelism", "drop --decode-context-parallel-size"),
    ],
)
def test_refused_in_one_sentence_that_names_the_setting(released, case, words):
    assert "KVPP was asked for and cannot be active" in released[case]
    assert words in released[case]


@pytest.mark.parametrize(
    ("stack", "given", "additional", "words"),
    [
        (RELEASED, "{}", {}, "has no KVPP of its own to be served in place of"),
        (OWN_KVPP, "{}", ON, "leave one of them out"),
        (OWN_KVPP, "yes", {}, "KVPP_DAG_SETTINGS is 'yes'; expected a JSON object of settings"),
        (OWN_KVPP, "3", {}, "expected an object of settings"),
        (OWN_KVPP, '{"no_such": 1}', {}, "the unknown setting 'no_such'"),
    ],
)
def test_the_variable_is_refused_where_it_is_not_clear_what_it_means(
    models, library, stack, given, additional, words
):
    variables = {"KVPP_DAG_SETTINGS": given}
    found = refused(models, library, {"case": ({}, additional)}, stack=stack, environment=variables)
    assert words in found["case"]
