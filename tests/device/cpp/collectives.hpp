// Collectives of the test device, in the order of the current stream as NCCL's are, over a backend for host tensors.

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace kvpp_device {

c10::intrusive_ptr<c10d::Backend> make_collectives(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size);

}  // namespace kvpp_device
