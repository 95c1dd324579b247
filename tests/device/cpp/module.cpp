// What Python calls of the test device: the operators `torch.ops.kvpp_device`, and this extension module.

#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <thread>

#include "collectives.hpp"
#include "memory.hpp"
#include "streams.hpp"
#include "tensors.hpp"

namespace kvpp_device {
namespace {

std::atomic<bool> gate_open{true};

// What tests do to the device, and ask of it. `delay`, `hold` and `fail` go to the current stream.
TORCH_LIBRARY(kvpp_device, m) {
  m.def("delay(float seconds) -> ()", [](double seconds) {
    current().push([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  m.def("hold() -> ()", [] {
    gate_open = false;
    current().push([] {
      while (!gate_open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  });
  m.def("let_go() -> ()", [] { gate_open = true; });
  m.def("fail(str message) -> ()", [](const std::string& message) {
    current().push([message] { throw std::runtime_error(message); });
  });
  m.def("reset() -> ()", [] { clear_failure(); });
  m.def("random_query(bool on) -> ()", [](bool on) { random_queries = on; });
  m.def("allocations() -> int", [] { return count_allocations(); });
  m.def("events() -> int", [] { return events.load(); });
  m.def("collectives() -> int[]", [] {  // by stream, the default stream first
    std::vector<int64_t> counts;
    for (int64_t id = 0; id < count_queues(); ++id) counts.push_back(queue(id).collectives);
    return counts;
  });
  m.def("host(Tensor(a) tensor) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(kvpp_device, PrivateUse1, m) {
  m.impl("host", [](const at::Tensor& tensor) { return host(tensor); });
}

// Calls `function` from the current stream; what it raises fails the device.
void launch(pybind11::object function) {
  std::shared_ptr<pybind11::object> kept(new pybind11::object(std::move(function)), [](pybind11::object* object) {
    pybind11::gil_scoped_acquire gil;
    delete object;
  });
  pybind11::gil_scoped_release no_gil;
  current().push([kept] {
    pybind11::gil_scoped_acquire gil;
    try {
      (*kept)();
    } catch (pybind11::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  });
}

// Lets this device submit an operator that a library has registered for every backend, as vLLM's CPU build does with
// some: they would read device memory at once, before the stream gets there.
void claim(const std::string& space, const std::string& name) {
  auto* library = new torch::Library(torch::Library::IMPL, space, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The device's view of pinned host memory: the same bytes, read when a stream gets there.
at::Tensor view_of_pinned(const at::Tensor& tensor) {
  TORCH_CHECK(is_pinned(tensor.data_ptr()), "the tensor is not in pinned memory");
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep = tensor.storage()](void*) {})
      .options(at::TensorOptions().dtype(tensor.scalar_type()).device(current_device()))
      .target_device(current_device())
      .make_tensor();
}

}  // namespace
}  // namespace kvpp_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("launch", &kvpp_device::launch);
  m.def("claim", &kvpp_device::claim);
  m.def("view_of_pinned", &kvpp_device::view_of_pinned);
  m.def("make_collectives", &kvpp_device::make_collectives);
}
