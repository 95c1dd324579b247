// Making tensors, views of them, and copies within the device and between it and the host.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "memory.hpp"
#include "streams.hpp"
#include "tensors.hpp"

namespace kvpp_device {

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  size_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) {
    drain_current();
    c10::DataPtr bigger = device_memory()->allocate(needed);
    if (self.storage().nbytes() > 0) std::memcpy(bigger.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(bigger));
    self.storage().set_nbytes(needed);
  }
  if (self.sizes() != size) self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_memory(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// Pageable memory is read when the copy is submitted; pinned memory when the device gets there, as it is by then.
void copy_to_device(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor source = is_pinned(self.data_ptr()) ? self : self.clone();
  current().push([source, target = host(to)] { target.copy_(source); });
  if (!non_blocking) drain_current();
}

// Pageable memory has been written when the copy returns.
void copy_to_host(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  current().push([source = host(self), to] { to.copy_(source); });
  if (!non_blocking || !is_pinned(to.data_ptr())) drain_current();
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0 && to.numel() == 0) return to;
  if (!on_device(to)) {
    copy_to_host(self, to, non_blocking);
  } else if (!on_device(self)) {
    copy_to_device(self, to, non_blocking);
  } else {
    current().push([source = host(self), target = host(to)] { target.copy_(source); });
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) { used_by(self.storage().data_ptr(), stream.id()); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace kvpp_device
