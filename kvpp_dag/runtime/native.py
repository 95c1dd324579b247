"""torch's own stream and event classes, bound when this module is imported.

Engines replace the names in `torch` for the whole process: vllm-ascend's model runner sets `torch.Event` to
a class that takes no device, and vLLM's CPU worker sets it to a placeholder that does nothing.
"""

import torch

NativeEvent: type[torch.Event] = torch._C.Event
NativeStream: type[torch.Stream] = torch._C.Stream
