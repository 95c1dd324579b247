// Memory of the test device, which is host memory, and pinned host memory.
//
// A block that is freed is filled with kPoison when the stream that was current at its allocation gets there: from then
// on a caching allocator could have handed it to later work of that stream. Work of another stream that still reads it
// must be named by record_stream, as on a real device.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace kvpp_device {

constexpr int kPoison = 0xCD;  // also what fresh memory holds

c10::Allocator* device_memory();
bool is_device_memory(const c10::DataPtr& data);
void used_by(const c10::DataPtr& data, int64_t stream);
int64_t count_allocations();

c10::Allocator* pinned_memory();
bool is_pinned(const void* pointer);

}  // namespace kvpp_device
