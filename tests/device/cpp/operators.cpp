// Every operator without a kernel of its own runs by the CPU's kernel on the same memory:
// - in place or out=: submitted to the current stream;
// - with results that are new tensors: the meta kernel gives their shapes, and the rest is submitted;
// - neither (no meta kernel, shapes that depend on data, a result that is no tensor): once the current stream is idle.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <unordered_set>
#include <vector>

#include "memory.hpp"
#include "streams.hpp"
#include "tensors.hpp"

namespace kvpp_device {

using Values = std::vector<c10::IValue>;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

at::Tensor host(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  if (tensor.storage().nbytes() == 0 || is_device_memory(tensor.storage().data_ptr()))
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  // A view of pinned memory, which is not freed in the order of a stream.
  auto keep = [storage = tensor.storage()](void*) {};
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options);
}

at::Tensor empty_like_on_device(const at::Tensor& tensor) {
  return at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      tensor.scalar_type());
}

namespace {

// Whether a kernel reads the tensor as a number that the host has given it.
bool is_number(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// A tensor as the device reads it later: what is on the host is read when the operator is submitted.
at::Tensor argument(const at::Tensor& tensor) {
  if (on_device(tensor)) return host(tensor);
  return is_number(tensor) || !tensor.device().is_cpu() ? tensor : tensor.clone();
}

at::Tensor shape_of(const at::Tensor& tensor) {
  if (is_number(tensor) || (!on_device(tensor) && tensor.dim() == 0)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

at::Tensor to_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor result = empty_like_on_device(tensor);
  host(result).copy_(tensor);
  return result;
}

// `value` with `change` applied to each tensor in it, and this device replaced by `device`.
c10::IValue map(const c10::IValue& value, at::Tensor (*change)(const at::Tensor&), c10::DeviceType device) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(device);
  return value;
}

Values map(const Values& values, at::Tensor (*change)(const at::Tensor&), c10::DeviceType device) {
  Values mapped;
  for (const auto& value : values) mapped.push_back(map(value, change, device));
  return mapped;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Gives empty out= tensors the size that the meta kernel gives them: a CPU kernel cannot resize an alias.
void resize_outputs(const c10::OperatorHandle& op, const Values& given) {
  const auto& arguments = op.schema().arguments();
  std::vector<size_t> outputs;
  for (size_t i = 0; i < given.size(); ++i)
    if (is_written(arguments[i]) && arguments[i].kwarg_only() && given[i].isTensor() &&
        on_device(given[i].toTensor()) && given[i].toTensor().numel() == 0)
      outputs.push_back(i);
  if (outputs.empty()) return;
  Values shapes = map(given, shape_of, c10::kMeta), stack = shapes;
  op.callBoxed(stack);
  for (size_t i : outputs) resize(given[i].toTensor(), shapes[i].toTensor().sizes(), std::nullopt);
}

void submit_writing(const c10::OperatorHandle& op, const Values& given) {
  resize_outputs(op, given);
  const auto& arguments = op.schema().arguments();
  Values passed;
  for (size_t i = 0; i < given.size(); ++i)
    passed.push_back(map(given[i], is_written(arguments[i]) ? host : argument, c10::kCPU));
  current().push([op, passed] {
    Values stack = passed;
    op.callBoxed(stack);
  });
}

// Operators that were seen to have no usable meta kernel.
bool lacks_shapes(const c10::OperatorHandle& op, bool now_known = false) {
  static std::mutex mutex;
  static auto& names = *new std::unordered_set<c10::OperatorName>;
  Lock lock(mutex);
  if (now_known) names.insert(op.operator_name());
  return names.count(op.operator_name()) > 0;
}

// Returns false if the shapes of the results are not known before it has run.
bool submit_functional(const c10::OperatorHandle& op, const Values& given, Values& results) {
  for (const auto& value : op.schema().returns())
    if (value.type()->kind() != c10::TypeKind::TensorType) return false;
  if (op.schema().returns().empty() || lacks_shapes(op)) return false;
  Values shapes = map(given, shape_of, c10::kMeta);
  std::vector<at::Tensor> targets;
  try {
    op.callBoxed(shapes);
    for (const auto& shape : shapes) {
      TORCH_CHECK(shape.toTensor().defined() && shape.toTensor().is_meta(), "not a meta tensor");
      results.emplace_back(empty_like_on_device(shape.toTensor()));
      targets.push_back(host(results.back().toTensor()));
    }
  } catch (const std::exception&) {  // an error of the call itself is raised again when it is run
    results.clear();
    lacks_shapes(op, true);
    return false;
  }
  current().push([op, targets, passed = map(given, argument, c10::kCPU)] {
    Values stack = passed;
    op.callBoxed(stack);
    for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(stack[i].toTensor());
  });
  return true;
}

Values run_now(const c10::OperatorHandle& op, const Values& given) {
  drain_current();
  Values stack = map(given, host, c10::kCPU);
  op.callBoxed(stack);
  return map(stack, to_device, kType);
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  auto first = stack->end() - static_cast<int64_t>(arguments.size());
  Values given(first, stack->end()), results, written;
  for (size_t i = 0; i < given.size(); ++i)
    if (is_written(arguments[i])) written.push_back(given[i]);
  const auto& returns = schema.returns();
  if (!written.empty() && (returns.empty() || returns.size() == written.size())) {
    submit_writing(op, given);
    if (!returns.empty()) results = written;
  } else {
    for (const auto& value : returns)
      TORCH_CHECK(value.alias_info() == nullptr, schema, " returns a view, and the test device has no kernel for it");
    if (!written.empty() || !submit_functional(op, given, results)) results = run_now(op, given);
  }
  stack->erase(first, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace kvpp_device
