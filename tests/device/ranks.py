"""Ranks of `kvpp_dag.check_device`'s model, with what only tests do to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpp_dag import check_device
from kvpp_dag.check_device import Served, check_plan, reference, run_ranks
from kvpp_dag.check_device.device import PATIENCE
from kvpp_dag.check_device.ranks import POISON
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import Observer, Transport
from tests.device.device import Device

__all__ = [
    "PATIENCE",
    "Alone",
    "DeviceEngine",
    "Setting",
    "one_rank",
    "reference",
    "serve",
    "serve_ranks",
]


@dataclass(frozen=True, kw_only=True)
class Setting(check_device.Setting):
    """How ranks run. `fail[rank] = (forward, layer)` makes a rank's compute raise there; all then repeat it."""

    fail: dict[int, tuple[int, int]] = field(default_factory=dict)
    wrap: Callable[[Transport], Transport] | None = None
    log: Callable[[int, str, str], object] | None = None
    observer: Callable[[int], Observer] | None = None


class DeviceEngine(check_device.DeviceEngine):
    """A rank that can be made to fail, and whose streams take notes."""

    setting: Setting

    def __init__(self, device: Device, plan: StagePlan, transport: Transport, setting: Setting) -> None:
        self.fail_at: int | None = None
        observer = setting.observer(transport.rank) if setting.observer else None
        wrapped = setting.wrap(transport) if setting.wrap else transport
        super().__init__(device, plan, wrapped, setting, observer=observer)

    def run(self, token: int, block: int, *, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        super().run(token, block)

    def attend(self, token: int, layer: int, block: int) -> None:
        if layer == self.fail_at:
            raise ArithmeticError(f"compute {layer} fell over")
        super().attend(token, layer, block)

    def compute_stream_of(self) -> Any:
        return self._noting(super().compute_stream_of())

    def side_stream_of(self, name: str) -> Any:
        return self._noting(super().side_stream_of(name))

    def _noting(self, stream: Any) -> Any:
        """`stream`, which logs what it is told to do, if anybody wants to know."""
        if self.setting.log is not None:
            for op in ("record", "wait", "launch"):
                setattr(stream, op, self._noted(op, getattr(stream, op)))
        return stream

    def _noted(self, op: str, call: Callable[[Any], object]) -> Callable[[Any], object]:
        def noted(what: Any) -> object:
            self.setting.log(self.rank, op, getattr(what, "name", ""))
            return call(what)

        return noted


def serve(
    transport: Transport, device: Device, layers: int, blocks: Sequence[int], setting: Setting
) -> Served:
    """As `check_device.serve`; a forward that is to fail is aborted and repeated."""
    engine = DeviceEngine(device, check_plan(layers, transport.size, setting), transport, setting)
    repeated = {forward for forward, _ in setting.fail.values()}
    for token, block in enumerate(blocks):
        engine.poison(POISON)
        if token in repeated:
            forward, layer = setting.fail.get(transport.rank, (-1, -1))
            try:
                engine.run(token, block, fail_at=layer if forward == token else None)
            except ArithmeticError as error:
                with engine.compute_stream:
                    engine.forward.abort(error)
        engine.run(token, block)
    return engine.served(len(blocks))


def serve_ranks(
    device: Device, ranks: int, layers: int, blocks: Sequence[int], setting: Setting | None = None
) -> list[Served]:
    """`serve` on every rank of a local group."""
    used = setting or Setting()
    return run_ranks(ranks, lambda transport: serve(transport, device, layers, blocks, used))


def one_rank(device, **setting):
    """An engine whose layers all belong to a peer that does nothing, so that it can run alone."""
    used = Setting(**setting)
    return DeviceEngine(device, check_plan(4, 2, used), Alone(), used)


class Alone:
    """A transport without peers: a broadcast is a write into its own buffer."""

    rank, size = 0, 2

    def prepare(self, view, owner):
        return lambda: view.fill_(owner + 3)

    def agree(self, token):
        pass
