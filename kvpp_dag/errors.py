"""Every exception this package raises on purpose.

The hierarchy tells apart who has to act: `ConfigError` and `LayoutError` are the user's settings and
specs, `GraphError` is a graph that must not run, `ForwardError` is an engine that calls the hooks in
an order that no graph allows, and `TransferError` is a peer or a link.
"""

from asyncio import CancelledError
from collections.abc import Mapping


class KvppError(Exception):
    """Base of everything below; catch it to catch only what kvpp_dag raises on purpose."""


class ConfigError(KvppError, ValueError):
    """A setting is unknown, out of range, or does not go together with another one."""


class CapacityError(ConfigError):
    """More blocks were asked for than the memory of a worker holds."""


class LayoutError(KvppError, ValueError):
    """A cache spec or a tensor does not have the layout that a transfer needs."""


class NotActiveError(KvppError, RuntimeError):
    """KVPP was asked for and cannot be active: a seam of the engine is missing or has changed."""


class GraphError(KvppError):
    """A graph is malformed, unsound, or cannot be lowered."""


class DumpError(GraphError):
    """A graph dump cannot be read; the message names the place."""


class UnsoundGraphError(GraphError):
    """Verification found a race, a deadlock or an unjoined transfer.

    `findings` holds the findings in the order in which they were found.
    """

    def __init__(self, message: str, findings: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class ForwardError(KvppError, RuntimeError):
    """The engine called a hook that this point of the forward does not allow."""


class OrderError(ForwardError):
    """A layer was acquired or released out of its ordinal order."""


class CoverageError(ForwardError):
    """A forward ended before every target layer was acquired and released."""


class BlocksError(ForwardError):
    """The engine named blocks that its cache does not have, or named them out of order."""


class ReentryError(ForwardError):
    """A forward was begun while another one is in flight."""


class TransferError(KvppError, RuntimeError):
    """A transfer failed, or did not finish within the configured time."""


class SelfCheckError(TransferError):
    """What arrived in the self check, before the first forward, is not what was sent."""


class DivergenceError(TransferError):
    """Ranks of one KVPP group do not run the same forward."""


class NodeError(KvppError, RuntimeError):
    """A node of a graph raised.

    `node` is its id, `states` the final state of every node of that run, and the original exception is
    the cause.
    """

    def __init__(self, message: str, node: str, states: Mapping[str, str]) -> None:
        super().__init__(message)
        self.node = node
        self.states = states


class NodeTimeoutError(NodeError):
    """A node did not return in time. It still runs on its stream, since a thread cannot be killed."""


class RunCancelledError(CancelledError):
    """The task of a graph's run was cancelled; `states` is the final state of every node.

    The cause is the first failure of a node, if there was one. It is no KvppError, which
    `except Exception` would swallow.
    """

    def __init__(self, states: Mapping[str, str]) -> None:
        super().__init__("The run of a graph was cancelled.")
        self.states = states
