"""`kvpp-dag check-device` where torch finds the test device, as it finds a vendor's once its package is imported.

`python -m tests.device.run_check_device LIBRARY [arguments of the command]`. What stands outside `main` runs in
the processes of the command as well, since they import the main module of the first one.
"""

import os
import sys
from pathlib import Path

import torch

from kvpp_dag.check_device import Device
from kvpp_dag.cli import main
from kvpp_dag.runtime.vendors import VENDORS, Vendor
from tests.device.build import COLLECTIVES, NAME, load_test_device

LIBRARY = "KVPP_TEST_DEVICE_LIBRARY"

if __name__ == "__main__":
    os.environ[LIBRARY] = sys.argv.pop(1)

# The test device computes on processors that others use as well, so that work lasts as long as they let it.
Device.delay = lambda self, seconds: torch.ops.kvpp_device.delay(seconds)
VENDORS[NAME] = Vendor(collectives=COLLECTIVES)
load_test_device(Path(os.environ[LIBRARY]))

if __name__ == "__main__":
    main()
