"""Is KVPP right on the accelerator of this machine, and what does it cost there? For `kvpp-dag check-device`.

A small deterministic model runs on several ranks and must compute what one rank alone computes, to the bit;
with a wait left out it must not. Ranks are threads on one device; where there are several devices they are
also processes, one a device, over the collectives of the vendor's library.
"""

from kvpp_dag.check_device.checks import RIGHT, WRONG, Check, check_devices, check_one_device
from kvpp_dag.check_device.device import Device, open_device
from kvpp_dag.check_device.figures import measure
from kvpp_dag.check_device.model import DeviceEngine, Served, Setting, check_plan
from kvpp_dag.check_device.ranks import reference, run_ranks, serve, serve_ranks

__all__ = [
    "RIGHT",
    "WRONG",
    "Check",
    "Device",
    "DeviceEngine",
    "Served",
    "Setting",
    "check_devices",
    "check_one_device",
    "check_plan",
    "measure",
    "open_device",
    "reference",
    "run_ranks",
    "serve",
    "serve_ranks",
]
