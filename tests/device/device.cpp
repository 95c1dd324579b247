// A small accelerator for tests, on PyTorch's PrivateUse1 device type. Its memory is host memory; each
// stream is a FIFO queue with a thread of its own, so that work really runs later than it is submitted.
// Every in-place and out= operator runs on the current stream, by the CPU's kernel on the same memory;
// operators that would have to allocate their result are refused.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

// The first failure of asynchronous work; like a real device's, it stays until the device is reset.
struct Failure {
  std::mutex mutex;
  std::string message;
  void set(const std::string& text) {
    Lock lock(mutex);
    if (message.empty()) message = text;
  }
  bool is_set() {
    Lock lock(mutex);
    return !message.empty();
  }
  void check() {
    Lock lock(mutex);
    TORCH_CHECK(message.empty(), "device failure: ", message);
  }
  void clear() {
    Lock lock(mutex);
    message.clear();
  }
};
Failure& failure = *new Failure;

struct Queue {
  struct Item {
    std::function<void()> run;
    bool always;  // events move on even after a failure, so that nobody hangs
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;

  Queue() {
    std::thread([this] { serve(); }).detach();
  }
  void push(std::function<void()> run, bool always = false) {
    Lock lock(mutex);
    items.push_back({std::move(run), always});
    changed.notify_all();
  }
  bool idle() {
    Lock lock(mutex);
    return items.empty();
  }
  void drain() {
    Lock lock(mutex);
    changed.wait(lock, [this] { return items.empty(); });
  }
  void serve() {
    for (;;) {
      Lock lock(mutex);
      changed.wait(lock, [this] { return !items.empty(); });
      // Moved out, so that what it holds is let go without the lock: a tensor may need Python's lock.
      Item item = std::move(items.front());
      lock.unlock();
      try {
        if (item.always || !failure.is_set()) item.run();
      } catch (const std::exception& error) {
        failure.set(error.what());
      }
      item.run = nullptr;
      lock.lock();
      items.pop_front();
      changed.notify_all();
    }
  }
};

// Queues are never destroyed: their threads end with the process.
struct Queues {
  std::mutex mutex;
  std::deque<Queue> all;
  Queues() { all.emplace_back(); }
  Queue& at(int64_t id) {
    Lock lock(mutex);
    return all.at(id);
  }
  int64_t add() {
    Lock lock(mutex);
    all.emplace_back();
    return static_cast<int64_t>(all.size()) - 1;
  }
  void drain() {
    size_t count;
    {
      Lock lock(mutex);
      count = all.size();
    }
    for (size_t id = 0; id < count; ++id) at(id).drain();
  }
};
Queues& queues = *new Queues;
thread_local int64_t current_id = 0;
Queue& current() { return queues.at(current_id); }

// Counts its records: a wait is for the record that was the last one when the wait was submitted.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t reached = 0;
  Clock::time_point time;
};
using EventPtr = std::shared_ptr<Event>;

std::atomic<int64_t> allocations{0};
std::atomic<int64_t> events{0};
std::atomic<bool> random_query{false};
std::atomic<bool> gate_open{true};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = std::malloc(nbytes + 1);
    std::memset(data, 0xCD, nbytes);
    ++allocations;
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  explicit Guard(c10::DeviceType = kType) {}
  static EventPtr& at(void* event) { return *static_cast<EventPtr*>(event); }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(queues.add()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto previous = stream(current_id);
    current_id = next.id();
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    failure.check();
    return queues.at(stream.id()).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues.at(stream.id()).drain();
    failure.check();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    queues.drain();
    failure.check();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (*event == nullptr) {
      *event = new EventPtr(std::make_shared<Event>());
      ++events;
    }
    EventPtr shared = at(*event);
    Lock lock(shared->mutex);
    uint64_t version = ++shared->recorded;
    lock.unlock();
    queues.at(stream.id()).push(
        [shared, version] {
          Lock lock(shared->mutex);
          shared->reached = version;
          shared->time = Clock::now();
          shared->changed.notify_all();
        },
        true);
  }
  void block(void* event, const c10::Stream& stream) const override {
    EventPtr shared = at(event);
    Lock lock(shared->mutex);
    uint64_t version = shared->recorded;
    lock.unlock();
    queues.at(stream.id()).push(
        [shared, version] {
          Lock lock(shared->mutex);
          shared->changed.wait(lock, [&] { return shared->reached >= version; });
        },
        true);
  }
  bool queryEvent(void* event) const override {
    failure.check();
    if (random_query) {
      thread_local std::minstd_rand random(7);
      return random() % 2 == 0;
    }
    Lock lock(at(event)->mutex);
    return at(event)->reached >= at(event)->recorded;
  }
  void synchronizeEvent(void* event) const override {
    EventPtr shared = at(event);
    Lock lock(shared->mutex);
    shared->changed.wait(lock, [&] { return shared->reached >= shared->recorded; });
    lock.unlock();
    failure.check();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(at(to)->time - at(from)->time).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};
const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// The CPU tensor over the same memory.
at::Tensor host(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

c10::IValue host(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? host(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorList()) list.push_back(host(tensor));
  return list;
}

// Runs any in-place or out= operator on the current stream.
void enqueue(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  auto first = stack->end() - static_cast<int64_t>(arguments.size());
  std::vector<c10::IValue> kept(first, stack->end()), passed, results;
  for (size_t i = 0; i < kept.size(); ++i) {
    passed.push_back(host(kept[i]));
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) results.push_back(kept[i]);
  }
  TORCH_CHECK(
      results.size() == op.schema().returns().size() && !results.empty(),
      op.schema(), " makes a new tensor; the test device runs in-place and out= operators only");
  current().push([op, kept, passed] {
    torch::jit::Stack arguments = passed;
    op.callBoxed(arguments);
  });
  stack->erase(first, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

// A copy within the device is asynchronous; one from or to the host waits, unless told not to.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  current().push([self, to, source = host(self), target = host(to)] { target.copy_(source); });
  if (!non_blocking && self.device() != to.device()) {
    current().drain();
    failure.check();
  }
  return to;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&enqueue>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("_copy_from", TORCH_FN(copy_from));
}

// What tests do to the device. `delay`, `hold`, `launch` and `fail` go to the current stream.
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
  m.def("launch(int function) -> ()", [](int64_t function) {
    current().push([function] { reinterpret_cast<void (*)()>(function)(); });
  });
  m.def("fail(str message) -> ()", [](const std::string& message) {
    current().push([message] { throw std::runtime_error(message); });
  });
  m.def("host(Tensor(a) tensor) -> Tensor(a)");
  m.def("report(str message) -> ()", [](const std::string& message) { failure.set(message); });
  m.def("reset() -> ()", [] { failure.clear(); });
  m.def("random_query(bool on) -> ()", [](bool on) { random_query = on; });
  m.def("allocations() -> int", [] { return allocations.load(); });
  m.def("events() -> int", [] { return events.load(); });
}

TORCH_LIBRARY_IMPL(kvpp_device, PrivateUse1, m) {
  m.impl("host", [](const at::Tensor& tensor) { return host(tensor); });
}

}  // namespace
