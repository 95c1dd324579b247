#include "memory.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "streams.hpp"

namespace kvpp_device {
namespace {

void* take_host_memory(size_t nbytes) {
  void* data = std::aligned_alloc(64, (nbytes + 64) / 64 * 64 + 64);
  TORCH_CHECK(data != nullptr, "no host memory for ", nbytes, " bytes");
  return data;
}

size_t total_memory() {
  static const size_t total = [] {
    const char* text = std::getenv("KVPP_TEST_DEVICE_MEMORY");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : size_t(1) << 31;
  }();
  return total;
}

class Memory final : public c10::DeviceAllocator {
 public:
  std::atomic<int64_t> allocations{0};

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes > free_bytes()) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the test device has no ", nbytes, " bytes left of ", total_memory());
    }
    void* data = take_host_memory(nbytes);
    std::memset(data, kPoison, nbytes);
    ++allocations;
    Lock lock(mutex_);
    blocks_[data] = {nbytes, current_id(), {}};
    for (auto* bytes : counted()) bytes->increase(nbytes);
    return {data, data, &free_block, current_device()};
  }

  // Poisons the block in the order of its stream. The memory itself goes back once every stream is past what was
  // submitted so far: work that wrongly reads or writes it later than it should meets this block and no other.
  void free(void* data) {
    if (in_fork()) return;  // nobody can tell what still uses it
    Lock lock(mutex_);
    Block block = blocks_.at(data);
    blocks_.erase(data);
    for (auto* bytes : counted()) bytes->decrease(block.nbytes);
    lock.unlock();
    for (int64_t stream : block.used_by) {
      if (stream == block.stream) continue;
      auto event = std::make_shared<Event>();
      record(event, stream);
      kvpp_device::block(event, block.stream);
    }
    std::shared_ptr<void> memory(data, &std::free);
    for (int64_t id = 0, count = count_queues(); id < count; ++id)
      if (id != block.stream && !queue(id).idle()) queue(id).push([memory] {}, true);
    auto poison = [memory, nbytes = block.nbytes] { std::memset(memory.get(), kPoison, nbytes); };
    if (queue(block.stream).idle()) {
      poison();
    } else {
      queue(block.stream).push(poison, true);
    }
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex_);
    auto found = blocks_.find(data.get());
    if (found != blocks_.end()) found->second.used_by.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(mutex_);
    for (auto* bytes : counted()) bytes->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {free_bytes(), total_memory()}; }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  static void free_block(void* data);

 private:
  struct Block {
    size_t nbytes;
    int64_t stream;
    std::set<int64_t> used_by;
  };

  std::array<c10::CachingAllocator::Stat*, 2> counted() {
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return {&stats_.allocated_bytes[all], &stats_.reserved_bytes[all]};
  }
  size_t free_bytes() {
    Lock lock(mutex_);
    size_t used = counted()[0]->current;
    return total_memory() > used ? total_memory() - used : 0;
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};
Memory& memory = *new Memory;
void Memory::free_block(void* data) { memory.free(data); }

// Only what lies in pinned memory is copied without the host waiting. A copy keeps what it reads or writes.
class Pinned final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = take_host_memory(nbytes);
    Lock lock(mutex_);
    ranges_[static_cast<char*>(data)] = nbytes;
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  void free(void* data) {
    Lock lock(mutex_);
    ranges_.erase(static_cast<char*>(data));
    lock.unlock();
    std::free(data);
  }
  bool holds(const void* pointer) {
    const auto* place = static_cast<const char*>(pointer);
    Lock lock(mutex_);
    auto after = ranges_.upper_bound(place);
    return after != ranges_.begin() && place <= std::prev(after)->first + std::prev(after)->second;
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  static void free_block(void* data);

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};
Pinned& pinned = *new Pinned;
void Pinned::free_block(void* data) { pinned.free(data); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device().index(); }
  void setCurrentDevice(c10::DeviceIndex next) const override { exchangeDevice(next); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex next) const override {
    return c10::impl::getDeviceGuardImpl(kType)->exchangeDevice(c10::Device(kType, next)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex next) const override { return exchangeDevice(next); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return current_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

const bool registered = [] {
  c10::SetAllocator(kType, &memory, 1);
  at::setHostAllocator(kType, &pinned);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Allocator* device_memory() { return &memory; }
bool is_device_memory(const c10::DataPtr& data) { return data.get_deleter() == &Memory::free_block; }
void used_by(const c10::DataPtr& data, int64_t stream) {
  memory.recordStream(data, c10::Stream(c10::Stream::UNSAFE, current_device(), stream));
}
int64_t count_allocations() { return memory.allocations; }
c10::Allocator* pinned_memory() { return &pinned; }
bool is_pinned(const void* pointer) { return pinned.holds(pointer); }

}  // namespace kvpp_device
