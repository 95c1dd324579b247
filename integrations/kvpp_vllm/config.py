"""The user's settings: `--additional-config '{"enable_kvpp": true, "kvpp": {...}}'`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpp_dag.errors import ConfigError


class KvppConfig(BaseModel):
    """The optional `kvpp` object of vLLM's additional_config.

    `trace_dir`: an absolute directory for graph dumps and traces; nothing is written without it.
    `trace_forwards`: how many of the last forwards a trace holds.
    `timeout_s`: seconds after which a transfer that a peer has not joined is an error.
    `verify_transfers`: look whether every transfer has arrived; slow, to check an installation.
    `skip_broadcasts`: leave every transfer out, as a control: outputs must then differ.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    trace_dir: Path | None = None
    trace_forwards: int = Field(default=64, ge=1, le=100_000)
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    verify_transfers: bool = False
    skip_broadcasts: bool = False


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
    return config


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    known = ", ".join(KvppConfig.model_fields)
    if first["type"] == "extra_forbidden":
        return f"additional_config.kvpp has the unknown setting {name!r}; the settings are {known}."
    return f"additional_config.kvpp.{name} is {first['input']!r}: {first['msg']}."
