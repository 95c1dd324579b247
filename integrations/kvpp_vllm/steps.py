"""What every worker with KVPP does in a step and at its end, whatever the platform."""

from typing import Any

from kvpp_vllm.rank import KvppRank


class KvppSteps:
    """Comes before a worker class of the engine among the bases; `kvpp` is there once the device is."""

    kvpp: KvppRank

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
