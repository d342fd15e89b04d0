// What the parts of the stand-in share: the log, refusals, and the device's memory.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace stand_in {

// A number from the environment.
inline size_t number(const char* name, size_t otherwise) {
  const char* value = getenv(name);
  return value && *value ? strtoull(value, nullptr, 10) : otherwise;
}

// One numbered line in the log, if there is one.
void log_line(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool has_log();
void flush_log();

// Says on stderr and in the log what was wrong with a call.
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Whether all of [begin, begin + bytes) is memory of a device that is mapped.
bool is_device_memory(const void* begin, size_t bytes);

// Whether a copy of so many bytes really moves them (STAND_IN_COPY_LIMIT_BYTES).
bool moves(size_t bytes);

// Bytes that a library takes on the current device, beside what is allocated through the runtime.
void take_on_current_device(size_t bytes);

// A new log begins with the communicators that exist.
void log_communicators();

}  // namespace stand_in
