"""What every worker with KVPP does, whatever the platform: join its group, in a step, and at its end."""

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.config import KvppConfig
from kvpp_vllm.rank import KvppRank
from kvpp_vllm.transports import make_transport


class KvppSteps:
    """Comes before a worker class of the engine among the bases; `kvpp` is there once the device is."""

    kvpp: KvppRank
    device: Any

    def join_group(self, config: KvppConfig | None) -> None:
        """Make the KVPP group of this pipeline stage, all its ranks together, once the device is set up.

        Raises NotActiveError without a configuration, and what `make_transport` raises.
        """
        if config is None:
            raise NotActiveError("A KVPP worker was made for a configuration that does not ask for it.")
        self.kvpp = KvppRank(
            config=config,
            transport=make_transport(config, list(get_tp_group().ranks), device=self.device),
            stage=get_pp_group().rank_in_group,
            device=self.device,
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step; its forward ends with it, or is aborted with it."""
        try:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            self.kvpp.end()
        except BaseException as error:
            self.kvpp.abort(error)
            raise
        return output

    def shutdown(self) -> None:
        """Write the trace of the last forwards, if asked for, and shut down as the engine does."""
        if hasattr(self, "kvpp"):
            self.kvpp.write_trace()
        super().shutdown()  # type: ignore[misc]

    def kvpp_stats(self) -> dict[str, Any]:
        """Figures of this rank, for `collective_rpc`; see `KvppRank.stats`."""
        return self.kvpp.stats()

    def kvpp_write_trace(self) -> str | None:
        """Write the trace of the last forwards now, for `collective_rpc`; returns its path."""
        return self.kvpp.write_trace()
