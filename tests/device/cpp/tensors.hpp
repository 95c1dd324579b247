// Tensors of the test device, and their operators.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace kvpp_device {

bool on_device(const at::Tensor& tensor);

// The CPU tensor over the same memory. It does not keep device memory, as a kernel's argument would not.
at::Tensor host(const at::Tensor& tensor);

at::Tensor empty_like_on_device(const at::Tensor& tensor);
const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>);

// Runs an operator that has no kernel of its own here, by the CPU's kernel on the same memory.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace kvpp_device
