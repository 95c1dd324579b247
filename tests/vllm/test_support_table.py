"""docs/support.toml is true: its tests exist and run where it says, and the plugin accepts and refuses what it says.

Every check is a function of a table, so that a control can hand it a row that is wrong.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from docs.support import PAGE, RAN, Row, Table, TableError, read_table, write_page
from kvpp_vllm.checks import WORKERS
from tests.support.vllm_cpu import REPOSITORY
from tests.vllm.refusals import row_configurations

ELSEWHERE = ("make test-npu", "make test-versions")
"""Places with an environment of their own, where tests are not collected but read."""

REFUSED = "NotActiveError: KVPP was asked for and cannot be active: "


@pytest.fixture(scope="module")
def table() -> Table:
    return read_table()


@pytest.fixture(scope="module")
def collected(table) -> dict[str, list[str]]:
    """Ids of the tests in all files that the table names: those that `make test` takes, and those it leaves."""
    files = {
        file_of(name)
        for row in table.rows
        for place in row.tests
        for name in row.tests[place]
        if place not in ELSEWHERE
    }
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.support.collected"]
    done = subprocess.run(
        [*command, *(str(path) for path in sorted(files) if (REPOSITORY / path).is_file())],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("COLLECTED ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("COLLECTED "))


def file_of(name: str) -> Path:
    return Path("tests") / re.split(r"::|\[", name)[0]


def named(name: str, ids: list[str]) -> list[str]:
    """The ids that a name of the table stands for."""
    path = str(file_of(name))
    mine = [test for test in ids if test.startswith(f"{path}::")]
    if case := re.fullmatch(r"[^:\[]+\[(.+)\]", name):
        return [test for test in mine if test.endswith(f"[{case[1]}]")]
    whole = f"tests/{name}"
    return [test for test in mine if whole == path or test == whole or test.startswith(f"{whole}[")]


def defined(name: str) -> bool:
    """Whether the file of a name is there, and defines its test."""
    file, _, test = name.partition("::")
    path = REPOSITORY / "tests" / file
    return path.is_file() and (not test or f"\ndef {test}(" in path.read_text())


def recipe(target: str) -> str:
    """What a target of the Makefile runs, and all that its lines name."""
    text = (REPOSITORY / "Makefile").read_text()
    found = re.search(rf"^{target}:.*\n((?:\t.*\n|#.*\n)+)", text, re.MULTILINE)
    return found[1] if found else ""


def misplaced(row: Row, collected: dict[str, list[str]]) -> list[str]:
    """What is wrong with where a row's tests are and run."""
    wrong = []
    for place, names in row.tests.items():
        for name in names:
            file = file_of(name)
            taken, left = (named(name, collected[key]) for key in ("taken", "left"))
            if place in ELSEWHERE:
                folders = [str(file), *(f"{folder}" for folder in file.parents)][:-2]
                there = any(re.search(rf"\b{folder}/?(\s|$)", recipe(place[5:])) for folder in folders)
                if not (there and defined(name)):
                    wrong.append(f"{place} does not run {name}")
            elif not taken + left:
                wrong.append(f"there is no test {name}")
            elif place == "make test" and left:
                wrong.append(f"make test leaves out {left[0]}")
            elif place == "make test-all" and taken:
                wrong.append(f"make test runs {taken[0]} already")
    return wrong


def not_accepted(row: Row, cases: dict[str, str]) -> list[str]:
    """Configurations of a row that the plugin does not take, on its Model Runner."""
    wrong = []
    for name, _, runner in row_configurations(row):
        workers = [f"{worker} on {runner}" for worker in WORKERS.values()]
        if cases[name] not in workers:
            wrong.append(f"{name}: {cases[name]}")
    return wrong


def not_refused(row: Row, cases: dict[str, str]) -> list[str]:
    """Cases of a row that are not refused for one of its settings, and settings that none of them names."""
    messages = {name: cases.get(name, "there is no such case") for name in row.cases}
    wrong = [
        f"{name}: {message}"
        for name, message in messages.items()
        if not message.startswith(REFUSED) or not any(s in message for s in row.settings)
    ]
    named = " ".join(messages.values())
    return wrong + [f"no case names {s}" for s in row.settings if row.cases and s not in named]


def unlisted(table: Table, cases: dict[str, str]) -> list[str]:
    """Cases that are refused, and that no row is about."""
    listed = {name for row in table.rows for name in row.cases}
    of_rows = {name for row in table.rows for name, _, _ in row_configurations(row)}
    refused = {name for name, message in cases.items() if message.startswith(REFUSED)}
    return sorted(refused - listed - of_rows)


def test_the_page_is_that_of_the_table(table):
    assert PAGE.read_text() == write_page(table), "run python -m docs.support"


def test_every_test_is_there_and_runs_where_its_row_says(table, collected):
    assert [problem for row in table.rows for problem in misplaced(row, collected)] == []


def test_every_configuration_of_a_row_is_accepted(table, cases):
    assert [problem for row in table.rows for problem in not_accepted(row, cases)] == []


def test_every_case_of_a_refused_row_is_refused_and_names_the_setting(table, cases):
    refused = [row for row in table.rows if row.evidence == "refused"]
    assert sum(len(row.cases) for row in refused) > 30
    assert [problem for row in refused for problem in not_refused(row, cases)] == []


def test_every_refusal_has_a_row(table, cases):
    assert unlisted(table, cases) == []


def test_what_has_run_names_what_ran_it(table):
    assert all(row.tests for row in table.rows if row.evidence in RAN)


# Controls: each check fails for a row that is wrong.


@pytest.mark.parametrize(
    ("place", "name", "words"),
    [
        ("make test", "vllm/test_no_such.py", "there is no test"),
        ("make test", "vllm/test_vllm_tokens.py::test_no_such", "there is no test"),
        ("make test-all", "vllm/test_matrix_v2.py[no_such]", "there is no test"),
        ("make test", "vllm/test_matrix_v2.py[tp4]", "make test leaves out"),
        ("make test", "vllm/test_soak.py", "make test leaves out"),
        ("make test-all", "vllm/test_vllm_tokens.py", "make test runs"),
        ("make test-versions", "vllm/test_soak.py", "make test-versions does not run"),
        ("make test-npu", "vllm/test_vllm_tokens.py", "make test-npu does not run"),
        ("make test-npu", "npu/test_npu_dense.py::test_no_such", "make test-npu does not run"),
        ("by hand", "vllm/test_no_such.py", "there is no test"),
    ],
)
def test_control_a_test_in_a_wrong_place_is_noticed(collected, place, name, words):
    row = Row(what="a control", evidence="run on real vLLM", tests={place: [name]})
    (problem,) = misplaced(row, collected)
    assert problem.startswith(words)


def test_control_an_accepted_row_that_is_refused_is_noticed(table, cases):
    row = table.rows[0]
    (name, _, _), *_ = row_configurations(row)
    assert not_accepted(row, cases) == []
    assert not_accepted(row, cases | {name: cases["dcp"]}) != []
    assert not_accepted(row, cases | {name: cases[name].replace("V1", "V2")}) != []


def test_control_a_refused_row_that_is_accepted_or_names_another_setting_is_noticed(table, cases):
    row = next(row for row in table.rows if "dcp" in row.cases)
    assert not_refused(row, cases) == []
    assert not_refused(replace(row, cases=["on"]), cases) != []
    assert not_refused(replace(row, cases=["pcp"]), cases) != []
    assert not_refused(replace(row, settings=[*row.settings, "--no-such"]), cases) != []
    assert not_refused(replace(row, cases=["no such"]), cases) != []


def test_control_a_refusal_without_a_row_is_noticed(table, cases):
    section = table.section[-1]
    shorter = replace(section, row=[row for row in section.row if "dcp" not in row.cases])
    assert unlisted(replace(table, section=[*table.section[:-1], shorter]), cases) == ["dcp"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('evidence = "surely"', "has evidence 'surely'; expected one of run on real vLLM"),
        ('evidence = "test device"\nno_config = "none"', "names no test"),
        ('evidence = "test device"\ntests."make test" = ["a"]', "neither a configuration nor a reason"),
        ('evidence = "test device"\ntests."now and then" = ["a"]', "has tests in 'now and then'"),
        ('evidence = "not yet run"\nno_config = "none"\ntests."make test" = ["a"]', "names tests"),
        ('evidence = "refused"\ncases = ["dcp"]', "expected the settings to change"),
        ('evidence = "not runnable"\nrunner = "V3"', "has runner 'V3'"),
        ('evidence = "not runnable"\nmodle = 1', "has 'modle'; expected only cases, config"),
        ("", "lacks something"),
    ],
)
def test_control_a_row_of_another_form_is_refused(row, words):
    text = f'last_run = "never"\n[[section]]\ntitle = "A"\n[[section.row]]\nwhat = "B"\n{row}\n'
    with pytest.raises(TableError, match=re.escape(words)):
        read_table(text)


def test_control_a_changed_row_makes_the_page_stale(table):
    section = table.section[0]
    changed = [replace(section.row[0], evidence="not yet run"), *section.row[1:]]
    other = replace(table, section=[replace(section, row=changed), *table.section[1:]])
    assert PAGE.read_text() != write_page(other)
