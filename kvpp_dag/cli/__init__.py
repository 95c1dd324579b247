"""The command `kvpp-dag`: a thin face on the other rooms.

Bad input is one sentence on standard error and exit status 2, never a traceback.
"""

from kvpp_dag.cli.main import main

__all__ = ["main"]
