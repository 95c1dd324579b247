"""Run the command as a user does."""

import os
import subprocess
import sys

PROGRAM = "from kvpp_dag.cli import main; main()"


def kvpp_dag(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"COLUMNS": "160"},
    )
