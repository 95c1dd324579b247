"""Who serves KVPP where vllm-ascend has one of its own, and where the settings are then."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from kvpp_dag.errors import ConfigError
from kvpp_vllm.config import KvppConfig, read_config

SETTINGS = "KVPP_DAG_SETTINGS"
"""The variable that lets this project's runtime serve in place of vllm-ascend's: settings as JSON, `{}` for none.

It carries them because a vllm-ascend with a KVPP of its own refuses keys of additional_config that it does not know.
"""


def own_kvpp() -> bool:
    """Whether the installed vllm-ascend reads `enable_kvpp` itself, by the text of its settings' module."""
    if importlib.util.find_spec("vllm_ascend") is None:
        return False
    found = importlib.util.find_spec("vllm_ascend.ascend_config")
    return (
        found is not None
        and found.origin is not None
        and "enable_kvpp" in Path(found.origin).read_text(encoding="utf-8")
    )


def read_settings(additional_config: Any) -> KvppConfig | None:
    """The settings of this project's runtime under vllm-ascend, if it is to serve, else None.

    Raises ConfigError for malformed ones, and where it is not clear who is to serve.
    """
    given = os.environ.get(SETTINGS)
    if given is None:
        return None if own_kvpp() else read_config(additional_config)
    if not own_kvpp():
        raise ConfigError(
            f"{SETTINGS} is set, and the installed vllm-ascend has no KVPP of its own to be served in place of; unset "
            "it, and give the settings in additional_config."
        )
    if isinstance(additional_config, dict) and additional_config.get("enable_kvpp"):
        raise ConfigError(
            f"additional_config.enable_kvpp asks for vllm-ascend's own KVPP, and {SETTINGS} for this project's; leave "
            "one of them out."
        )
    try:
        settings = json.loads(given)
    except ValueError as error:
        raise ConfigError(
            f"{SETTINGS} is {given!r}; expected a JSON object of settings ({error})."
        ) from error
    try:
        return read_config({"enable_kvpp": True, "kvpp": settings})
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS} stands for additional_config.kvpp, and: {error}") from error
