"""A pytest plugin that prints which tests a run would take and which it would leave out: `-p tests.support.collected`.

With --collect-only it prints a line "COLLECTED " and a JSON object: "taken" and "left", lists of test ids.
"""

import json

import pytest

LEFT: list[str] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    LEFT.extend(item.nodeid for item in items)


def pytest_collection_finish(session: pytest.Session) -> None:
    taken = [item.nodeid for item in session.items]
    print("\nCOLLECTED " + json.dumps({"taken": taken, "left": LEFT}))
