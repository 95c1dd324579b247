// Streams and events of the test device.
//
// A stream is a FIFO queue with a thread of its own, so that work really runs later than it is submitted. The thread
// starts with the first work: a process that has only loaded the device can still be forked.

#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace kvpp_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;  // all alike: memory is the process's, and each engine process uses one of them
using Lock = std::unique_lock<std::mutex>;

// The first failure of asynchronous work; like a real device's, it stays until the device is reset.
void fail(const std::string& message);
bool has_failed();
void check_failure();
void clear_failure();

class Queue {
 public:
  // With `always`, the work is done even after a failure: events move on and memory is freed, so that nobody hangs.
  void push(std::function<void()> run, bool always = false);
  bool idle();
  void drain();

  std::atomic<int64_t> collectives{0};

 private:
  struct Item {
    std::function<void()> run;
    bool always;
  };
  void serve();
  void await_work(Lock& lock);

  std::mutex mutex_;
  std::condition_variable work_, idle_;
  bool asleep_ = false;
  std::deque<Item> items_;
  bool started_ = false;
};

// Whether streams were used before this process was forked: their threads are in the other process.
bool in_fork();

// Queue 0 is the default stream. Queues are never destroyed: their threads end with the process.
Queue& queue(int64_t id);
int64_t count_queues();
void drain_all();

int64_t current_id();
Queue& current();
c10::Device current_device();
void drain_current();  // and raise what has failed

// Counts its records: a wait is for the record that was the last one when the wait was submitted.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;
  uint64_t reached = 0;
  std::chrono::steady_clock::time_point time;
};
using EventPtr = std::shared_ptr<Event>;
void record(const EventPtr& event, int64_t id);
void block(const EventPtr& event, int64_t id);

extern std::atomic<int64_t> events;       // made so far
extern std::atomic<bool> random_queries;  // whether Event.query answers at random

}  // namespace kvpp_device
