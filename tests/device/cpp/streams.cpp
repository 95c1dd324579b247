#include "streams.hpp"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "memory.hpp"

namespace kvpp_device {

std::atomic<int64_t> events{0};
std::atomic<bool> random_queries{false};

namespace {

// A device looks for work by itself; only after a while without any has the host to wake it, which takes the host
// some 10 us that no accelerator costs it.
constexpr int kLooks = 20;
constexpr auto kPause = std::chrono::microseconds(50);

struct Failure {
  std::mutex mutex;
  std::string message;
};
Failure& failure = *new Failure;

struct Queues {
  std::mutex mutex;
  std::deque<Queue> all;
  Queues() { all.emplace_back(); }
  int64_t add() {
    Lock lock(mutex);
    all.emplace_back();
    return static_cast<int64_t>(all.size()) - 1;
  }
};
Queues& queues = *new Queues;

std::atomic<pid_t> process{0};  // in which the threads run

thread_local int64_t stream_of_thread = 0;
thread_local c10::DeviceIndex device_of_thread = 0;

}  // namespace

void fail(const std::string& message) {
  Lock lock(failure.mutex);
  if (failure.message.empty()) failure.message = message;
}

bool has_failed() {
  Lock lock(failure.mutex);
  return !failure.message.empty();
}

void check_failure() {
  Lock lock(failure.mutex);
  TORCH_CHECK(failure.message.empty(), "device failure: ", failure.message);
}

void clear_failure() {
  Lock lock(failure.mutex);
  failure.message.clear();
}

void Queue::push(std::function<void()> run, bool always) {
  TORCH_CHECK(!in_fork(), "the test device was used before this process was forked");
  Lock lock(mutex_);
  if (!started_) {
    started_ = true;
    process = getpid();
    std::thread([this] { serve(); }).detach();
  }
  items_.push_back({std::move(run), always});
  const bool wake = asleep_;
  lock.unlock();
  if (wake) work_.notify_one();
}

bool Queue::idle() {
  Lock lock(mutex_);
  return items_.empty();
}

void Queue::drain() {
  Lock lock(mutex_);
  idle_.wait(lock, [this] { return items_.empty(); });
}

void Queue::await_work(Lock& lock) {
  for (int look = 0; items_.empty() && look < kLooks; ++look) {
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  }
  asleep_ = true;
  work_.wait(lock, [this] { return !items_.empty(); });
  asleep_ = false;
}

void Queue::serve() {
  c10::InferenceMode guard;  // an engine's tensors are inference tensors, which nothing else may write to
  for (;;) {
    Lock lock(mutex_);
    await_work(lock);
    // Moved out, so that what it holds is let go without the lock: a tensor may need Python's lock.
    Item item = std::move(items_.front());
    lock.unlock();
    try {
      if (item.always || !has_failed()) item.run();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    item.run = nullptr;
    lock.lock();
    items_.pop_front();
    if (items_.empty()) idle_.notify_all();
  }
}

bool in_fork() { return process != 0 && process != getpid(); }

Queue& queue(int64_t id) {
  Lock lock(queues.mutex);
  return queues.all.at(id);
}

int64_t count_queues() {
  Lock lock(queues.mutex);
  return static_cast<int64_t>(queues.all.size());
}

void drain_all() {
  for (int64_t id = 0, count = count_queues(); id < count; ++id) queue(id).drain();
}

int64_t current_id() { return stream_of_thread; }
Queue& current() { return queue(stream_of_thread); }
c10::Device current_device() { return c10::Device(kType, device_of_thread); }

void drain_current() {
  current().drain();
  check_failure();
}

void record(const EventPtr& event, int64_t id) {
  Lock lock(event->mutex);
  uint64_t version = ++event->recorded;
  lock.unlock();
  queue(id).push(
      [event, version] {
        Lock lock(event->mutex);
        event->reached = version;
        event->time = std::chrono::steady_clock::now();
        event->changed.notify_all();
      },
      true);
}

void block(const EventPtr& event, int64_t id) {
  Lock lock(event->mutex);
  uint64_t version = event->recorded;
  lock.unlock();
  queue(id).push(
      [event, version] {
        Lock lock(event->mutex);
        event->changed.wait(lock, [&] { return event->reached >= version; });
      },
      true);
}

namespace {

// What torch.Stream, torch.Event and torch.accelerator call.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  explicit Guard(c10::DeviceType = kType) {}

  static EventPtr& at(void* event) { return *static_cast<EventPtr*>(event); }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : current_device(), id);
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return current_device(); }
  c10::Device exchangeDevice(c10::Device next) const override {
    auto previous = current_device();
    setDevice(next);
    return previous;
  }
  void setDevice(c10::Device next) const override {
    if (next.has_index()) device_of_thread = next.index();
  }
  void uncheckedSetDevice(c10::Device next) const noexcept override { setDevice(next); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, stream_of_thread); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, queues.add()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, queues.add());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto previous = stream(next.device(), stream_of_thread);
    stream_of_thread = next.id();
    return previous;
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_failure();
    return queue(stream.id()).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue(stream.id()).drain();
    check_failure();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    drain_all();
    check_failure();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new EventPtr(std::make_shared<Event>());
      ++events;
    }
    kvpp_device::record(at(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override { kvpp_device::block(at(event), stream.id()); }
  bool queryEvent(void* event) const override {
    check_failure();
    if (random_queries) {
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
    check_failure();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(at(to)->time - at(from)->time).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    used_by(data, stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace kvpp_device
