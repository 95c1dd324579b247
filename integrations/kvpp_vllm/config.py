"""The user's settings: `--additional-config '{"enable_kvpp": true, "kvpp": {...}}'`."""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpp_dag.errors import ConfigError
from kvpp_dag.graph import Policy
from kvpp_dag.plan import Ownership
from kvpp_dag.runtime import Completion, Payload

MAX_CHOSEN = 10_000
"""Forwards that may be chosen for one trace: they are kept in memory until the last of them has ended."""


class TransportKind(StrEnum):
    """What carries the caches between ranks; `auto` is shared memory on one host, else process groups."""

    AUTO = "auto"
    PROCESS_GROUP = "process_group"
    SHARED_MEMORY = "shared_memory"


class KvppConfig(BaseModel):
    """The optional `kvpp` object of vLLM's additional_config.

    `trace_dir`: an absolute directory for graph dumps and traces; nothing is written without it.
    `trace_forwards`: which forwards to trace, as `first:end`, counted from 1 and without the end; the last 64
    if it is not given.
    `record`: whether forwards are recorded at all, for traces, failures and the log.
    `log_every`: forwards between two lines in the log that say what was sent and waited for; 0 for none.
    `profiler_ranges`: put hooks, transfers and layers into ranges of torch's profiler and of NVTX.
    `timeout_s`: seconds after which a transfer that a peer has not joined is an error.
    `payload`: what a forward with history sends of each bundle: all blocks, those in use, or the cheaper of the two.
    `policy`: when the next transfer may start: as the hook before attention returns, or the one behind it.
    `depth`: how many layers ahead transfers are started; there are `depth + 1` scratch slots.
    `completion`: whether the compute stream alone waits for a transfer, or the host too; on a CPU the host always does.
    `ownership`: whether the ranks own equally many layers, or as equal bytes as contiguous layers allow.
    `transport`: what carries the caches between ranks.
    `process_groups`: how many process groups carry a very large bundle together; two on a CPU and one on an
    accelerator, which can have no more, if it is not given.
    `self_check`: before the first request, run every kind of forward with known bytes and refuse to start if they do
    not arrive; on an accelerator alone, if it is not given.
    `verify_transfers`: look whether every transfer has arrived; slow, to check an installation.
    `skip_broadcasts`: leave every transfer out, as a control: outputs must then differ.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    trace_dir: Path | None = None
    trace_forwards: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,8}:[1-9][0-9]{0,8}$")
    record: bool = True
    log_every: int = Field(default=1000, ge=0)
    profiler_ranges: bool = False
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    payload: Payload = Payload.AUTO
    policy: Policy = Policy.ON_ACQUIRE
    depth: int = Field(default=1, ge=1, le=8)
    completion: Completion = Completion.STREAM
    ownership: Ownership = Ownership.COUNT
    transport: TransportKind = TransportKind.AUTO
    process_groups: Literal[1, 2, 4] | None = None
    self_check: bool | None = None
    verify_transfers: bool = False
    skip_broadcasts: bool = False

    @property
    def chosen_forwards(self) -> range:
        """The numbers of `trace_forwards`; empty if it is not given."""
        first, end = map(int, (self.trace_forwards or "0:0").split(":"))
        return range(first, end)


def read_config(additional_config: Any) -> KvppConfig | None:
    """The settings if KVPP is asked for, else None.

    Raises ConfigError for an `enable_kvpp` that is no boolean, and for unknown or malformed settings.
    """
    if not isinstance(additional_config, dict) or "enable_kvpp" not in additional_config:
        return None
    enabled = additional_config["enable_kvpp"]
    if not isinstance(enabled, bool):
        raise ConfigError(f"additional_config.enable_kvpp is {enabled!r}; expected true or false.")
    if not enabled:
        return None
    settings = additional_config.get("kvpp", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"additional_config.kvpp is {settings!r}; expected an object of settings.")
    try:
        config = KvppConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error
    if config.trace_dir is not None and not config.trace_dir.is_absolute():
        raise ConfigError(
            f"additional_config.kvpp.trace_dir is {str(config.trace_dir)!r}; expected an absolute path, "
            "since workers may run in another directory."
        )
    _check_tracing(config)
    if config.self_check and config.skip_broadcasts:
        raise ConfigError(
            "additional_config.kvpp sets both self_check and skip_broadcasts, and where nothing is sent nothing can "
            "arrive; leave one of them out."
        )
    return config


def _check_tracing(config: KvppConfig) -> None:
    """Raise ConfigError for settings of traces that contradict each other."""
    if config.trace_forwards is not None:
        if config.trace_dir is None:
            raise ConfigError(
                "additional_config.kvpp.trace_forwards chooses forwards to trace, but there is no trace_dir to "
                "write them to; give one."
            )
        if not 0 < len(config.chosen_forwards) <= MAX_CHOSEN:
            raise ConfigError(
                f"additional_config.kvpp.trace_forwards is {config.trace_forwards!r}; expected first:end with "
                f"1 to {MAX_CHOSEN} forwards, such as 100:105."
            )
    if config.trace_dir is not None and not config.record:
        raise ConfigError(
            "additional_config.kvpp asks for traces in trace_dir and sets record to false; leave one of them out."
        )


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    known = ", ".join(KvppConfig.model_fields)
    if first["type"] == "extra_forbidden":
        return f"additional_config.kvpp has the unknown setting {name!r}; the settings are {known}."
    return f"additional_config.kvpp.{name} is {first['input']!r}: {first['msg']}."
