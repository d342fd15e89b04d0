// A CUDA runtime, driver and cuBLAS that compute nothing. Device memory is host memory, reserved
// lazily, so that a device of 80 GB costs nothing until it is touched. Allocation, streams, events
// and copies are book-keeping and happen at once, in the order of the calls; a kernel leaves a line
// in the log. What the numbers would be is computed by values.py.
#include "stand_in.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace {

constexpr int MAX_DEVICES = 64;
constexpr size_t GRANULARITY_BYTES = 2 << 20;
constexpr int CUDA_VERSION_OF_DRIVER = 13000;
constexpr unsigned MAX_THREADS_OF_BLOCK = 1024, MAX_GRID_YZ = 65535;

std::mutex log_mutex, memory_mutex;
FILE* log_file = nullptr;
bool log_is_open = false;
unsigned long next_line = 0;

struct Range {
  size_t bytes;
  int device;
};
// Ranges by their first byte: usable device memory, reserved addresses, pinned host memory.
std::map<uintptr_t, Range> device_ranges, address_ranges, host_ranges;
size_t used_bytes[MAX_DEVICES], peak_bytes[MAX_DEVICES];
std::once_flag used_is_set;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool is_computing = false;  // inside an operation whose values are computed
bool values_are_required = false;
bool is_never_ready = false;  // what cudaEventQuery says of every event

cudaError_t failed(cudaError_t error) { return last_error = error; }

int num_devices() {
  static const int count = std::min<int>(stand_in::number("STAND_IN_DEVICES", 8), MAX_DEVICES);
  return count;
}

int major() {
  static const int value = stand_in::number("STAND_IN_MAJOR", 8);
  return value;
}

size_t total_bytes() {
  static const size_t bytes = stand_in::number("STAND_IN_MEMORY_BYTES", size_t(80) << 30);
  return bytes;
}

// With memory_mutex held.
bool take(int device, size_t bytes) {
  std::call_once(used_is_set, [] {
    std::fill_n(used_bytes, MAX_DEVICES, stand_in::number("STAND_IN_IN_USE_BYTES", 0));
    std::copy_n(used_bytes, MAX_DEVICES, peak_bytes);
  });
  if (used_bytes[device] + bytes > total_bytes()) return false;
  used_bytes[device] += bytes;
  peak_bytes[device] = std::max(peak_bytes[device], used_bytes[device]);
  return true;
}

void* reserve(size_t bytes, int protection) {
  void* begin = mmap(nullptr, std::max<size_t>(bytes, 1), protection,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return begin == MAP_FAILED ? nullptr : begin;
}

// With memory_mutex held: the range that an address lies in.
const Range* range_of(const std::map<uintptr_t, Range>& ranges, uintptr_t address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  --after;
  return address < after->first + std::max<size_t>(after->second.bytes, 1) ? &after->second
                                                                           : nullptr;
}

// With memory_mutex held: whether ranges that follow one another cover all of it.
bool covered(const std::map<uintptr_t, Range>& ranges, uintptr_t begin, size_t bytes) {
  for (uintptr_t at = begin; at < begin + bytes;) {
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    --after;
    if (at >= after->first + after->second.bytes) return false;
    at = after->first + after->second.bytes;
  }
  return true;
}

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

// Handles are never used again, so that an address in the log names one stream or event.
struct Stream {
  int priority;
};
struct Event {
  unsigned flags;
  double recorded_ms;
  bool is_recorded, is_alive;
};
Event* as_event(cudaEvent_t event) {
  auto* found = reinterpret_cast<Event*>(event);
  if (found && found->is_alive) return found;
  stand_in::complain("event %p does not live", (void*)event);
  return nullptr;
}

std::unordered_map<const void*, const char*>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, const char*>;
  return *names;
}

const char* name_of(const void* kernel) {
  auto found = kernel_names().find(kernel);
  return found == kernel_names().end() ? "unnamed" : found->second;
}

bool logs_kernels() {
  static const bool value = stand_in::number("STAND_IN_LOG_KERNELS", 0);
  return value;
}

cudaError_t run_kernel(const char* name, void* stream) {
  if (logs_kernels()) stand_in::log_line("KERNEL stream %p %s", stream, name);
  if (values_are_required && !is_computing) {
    stand_in::complain("kernel %s is launched outside of the operations that are computed", name);
    return failed(cudaErrorLaunchFailure);
  }
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, cudaStream_t stream) {
  const size_t threads = size_t(block.x) * block.y * block.z;
  const bool is_empty = !grid.x || !grid.y || !grid.z || !threads;
  if (is_empty || threads > MAX_THREADS_OF_BLOCK || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ) {
    stand_in::complain("kernel %s cannot be launched with grid (%u, %u, %u), block (%u, %u, %u)",
                       name_of(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z);
    return failed(cudaErrorInvalidConfiguration);
  }
  return run_kernel(name_of(kernel), stream);
}

const char* copy_kind(cudaMemcpyKind kind) {
  static const char* const names[] = {"H2H", "H2D", "D2H", "D2D", "any"};
  return names[kind];
}

// The check and the effect of every copy. Inside an operation whose values are computed its source
// may hold no values yet: what is written on the device is left to values.py, and the host reads
// zeros (as the number of elements that a kernel counted, say).
cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if ((to_device && !stand_in::is_device_memory(to, bytes)) ||
      (from_device && !stand_in::is_device_memory(from, bytes))) {
    stand_in::complain("copy %s of %zu bytes from %p to %p: not memory of a device",
                       copy_kind(kind), bytes, from, to);
    return failed(cudaErrorInvalidValue);
  }
  if (is_computing) {
    if (from_device && !to_device) memset(to, 0, bytes);
  } else if (stand_in::moves(bytes)) {
    memmove(to, from, bytes);
  }
  return cudaSuccess;
}

cudaError_t set(void* to, int value, size_t bytes) {
  if (!stand_in::is_device_memory(to, bytes)) {
    stand_in::complain("memset of %zu bytes at %p: not memory of a device", bytes, to);
    return failed(cudaErrorInvalidValue);
  }
  if (!is_computing && stand_in::moves(bytes)) memset(to, value, bytes);
  return cudaSuccess;
}

// Functions of the driver that are looked up by name and not written: each is a separate error.
constexpr int MAX_MISSING = 128;
std::string missing_names[MAX_MISSING];
int num_missing = 0;
std::mutex missing_mutex;

template <int number>
int call_missing() {
  stand_in::complain("%s is not written", missing_names[number].c_str());
  return CUDA_ERROR_NOT_SUPPORTED;
}

template <int... numbers>
void* missing_function(int number, std::integer_sequence<int, numbers...>) {
  static int (*const functions[])() = {call_missing<numbers>...};
  return reinterpret_cast<void*>(functions[number]);
}

void* missing_function(const char* name) {
  std::lock_guard<std::mutex> guard(missing_mutex);
  int number = 0;
  while (number < num_missing && missing_names[number] != name) ++number;
  if (number == MAX_MISSING) return nullptr;
  if (number == num_missing) missing_names[num_missing++] = name;
  return missing_function(number, std::make_integer_sequence<int, MAX_MISSING>());
}

}  // namespace

namespace stand_in {

bool has_log() {
  if (!log_is_open) {
    log_is_open = true;
    const char* path = getenv("STAND_IN_LOG");
    if (path && *path) log_file = fopen(path, "w");
  }
  return log_file != nullptr;
}

void log_line(const char* format, ...) {
  std::lock_guard<std::mutex> guard(log_mutex);
  if (!has_log()) return;
  fprintf(log_file, "%lu ", next_line++);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(log_file, format, arguments);
  va_end(arguments);
  fputc('\n', log_file);
}

void flush_log() {
  std::lock_guard<std::mutex> guard(log_mutex);
  if (log_file) fflush(log_file);
}

void complain(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "CUDA stand-in: %s\n", text);
  fflush(stderr);
  log_line("ERROR %s", text);
}

bool is_device_memory(const void* begin, size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  return covered(device_ranges, reinterpret_cast<uintptr_t>(begin), bytes);
}

bool moves(size_t bytes) {
  static const size_t limit = number("STAND_IN_COPY_LIMIT_BYTES", SIZE_MAX);
  return bytes <= limit;
}

void take_on_current_device(size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  take(current_device, bytes);
}

}  // namespace stand_in

using stand_in::complain;
using stand_in::log_line;

extern "C" {

// ---- what device.py calls ----

void stand_in_log(const char* path) {
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    if (log_file) fclose(log_file);
    log_file = path ? fopen(path, "w") : nullptr;
    log_is_open = true;
    next_line = 0;
  }
  stand_in::log_communicators();
}
void stand_in_flush() { stand_in::flush_log(); }
void stand_in_mark(const char* text) { log_line("MARK %s", text); }
size_t stand_in_used_bytes(int device) { return used_bytes[device]; }
size_t stand_in_peak_bytes(int device) { return peak_bytes[device]; }
// Another process takes memory of the device, or gives it back: what it has from here on.
void stand_in_others_use(int device, size_t bytes) {
  static size_t others_bytes[MAX_DEVICES];
  std::lock_guard<std::mutex> guard(memory_mutex);
  take(device, 0);
  used_bytes[device] += bytes - others_bytes[device];
  others_bytes[device] = bytes;
}
void stand_in_reset_peak(int device) { peak_bytes[device] = used_bytes[device]; }
int stand_in_computing(int value) {
  const int before = is_computing;
  is_computing = value;
  return before;
}
void stand_in_require_values(int value) { values_are_required = value; }
// A kernel whose values the caller computes; whether they are required.
int stand_in_kernel(const char* name, void* stream) {
  if (logs_kernels()) stand_in::log_line("KERNEL stream %p %s", stream, name);
  return values_are_required;
}
void stand_in_never_ready(int value) { is_never_ready = value; }

// ---- devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
  *p = {};
  const char* name = getenv("STAND_IN_NAME");
  snprintf(p->name, sizeof p->name, "%s", name ? name : "NVIDIA A100-SXM4-80GB");
  p->totalGlobalMem = total_bytes();
  p->major = major();
  p->multiProcessorCount = 108;
  p->warpSize = 32;
  p->maxThreadsPerBlock = MAX_THREADS_OF_BLOCK;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = INT32_MAX;
  p->maxGridSize[1] = p->maxGridSize[2] = MAX_GRID_YZ;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerMultiprocessor = 167936;
  p->sharedMemPerBlockOptin = 166912;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->l2CacheSize = 40 << 20;
  p->memoryBusWidth = 5120;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->ECCEnabled = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;  // no memory pools, no multicast, nothing else that is optional
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* value, int, int) {
  *value = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION_OF_DRIVER;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceSynchronize() {
  log_line("HSYNC device");
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  return "refused by the CUDA stand-in; stderr says why";
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---- memory ----

cudaError_t cudaMalloc(void** begin, size_t bytes) {
  std::unique_lock<std::mutex> guard(memory_mutex);
  const bool fits = take(current_device, bytes);
  const size_t used = used_bytes[current_device];
  *begin = fits ? reserve(bytes, PROT_READ | PROT_WRITE) : nullptr;
  if (*begin) device_ranges[reinterpret_cast<uintptr_t>(*begin)] = {bytes, current_device};
  guard.unlock();
  if (!fits) {
    log_line("OOM cudaMalloc %zu used %zu", bytes, used);
    return failed(cudaErrorMemoryAllocation);
  }
  log_line("MALLOC %p %zu used %zu", *begin, bytes, used);
  return cudaSuccess;
}
cudaError_t cudaFree(void* begin) {
  if (!begin) return cudaSuccess;
  std::unique_lock<std::mutex> guard(memory_mutex);
  auto found = device_ranges.find(reinterpret_cast<uintptr_t>(begin));
  if (found == device_ranges.end()) {
    guard.unlock();
    complain("cudaFree of %p, which cudaMalloc did not give", begin);
    return failed(cudaErrorInvalidValue);
  }
  used_bytes[found->second.device] -= found->second.bytes;
  munmap(begin, std::max<size_t>(found->second.bytes, 1));
  device_ranges.erase(found);
  guard.unlock();
  log_line("FREE %p", begin);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  take(current_device, 0);
  *total = total_bytes();
  *free_bytes = *total - std::min(*total, used_bytes[current_device]);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** begin, size_t bytes, unsigned) {
  *begin = reserve(bytes, PROT_READ | PROT_WRITE);
  if (!*begin) return failed(cudaErrorMemoryAllocation);
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    host_ranges[reinterpret_cast<uintptr_t>(*begin)] = {bytes, current_device};
  }
  log_line("PIN %p %zu", *begin, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* begin) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto found = host_ranges.find(reinterpret_cast<uintptr_t>(begin));
  if (found == host_ranges.end()) return failed(cudaErrorInvalidValue);
  munmap(begin, std::max<size_t>(found->second.bytes, 1));
  host_ranges.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* begin, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  host_ranges[reinterpret_cast<uintptr_t>(begin)] = {bytes, current_device};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* begin) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  const bool was_there = host_ranges.erase(reinterpret_cast<uintptr_t>(begin));
  return was_there ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->device = -1;
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->hostPointer = const_cast<void*>(address);
  std::lock_guard<std::mutex> guard(memory_mutex);
  const auto number = reinterpret_cast<uintptr_t>(address);
  if (const Range* range = range_of(device_ranges, number)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = range->device;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = nullptr;
  } else if (const Range* pinned = range_of(host_ranges, number)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = pinned->device;
    attributes->devicePointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  log_line("COPY %s %zu stream %p from %p to %p", copy_kind(kind), bytes, (void*)stream, from, to);
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  log_line("COPYSYNC %s %zu from %p to %p", copy_kind(kind), bytes, from, to);
  return copy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  log_line("COPY %s %zu stream %p from %p to %p", copy_kind(kind), width * height, (void*)stream,
           from, to);
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error = copy(static_cast<char*>(to) + row * to_pitch,
                                   static_cast<const char*>(from) + row * from_pitch, width, kind);
    if (error) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  log_line("SETSYNC %zu at %p", bytes, to);
  return set(to, value, bytes);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  log_line("SET %zu stream %p at %p", bytes, (void*)stream, to);
  return set(to, value, bytes);
}

// ---- streams and events ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  log_line("STREAM %p priority %d", (void*)*stream, priority);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  log_line("HSYNC stream %p", (void*)stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream ? reinterpret_cast<Stream*>(stream)->priority : 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!as_event(event)) return failed(cudaErrorInvalidResourceHandle);
  log_line("WAIT stream %p event %p", (void*)stream, (void*)event);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{flags, 0.0, false, true});
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Event* found = as_event(event);
  if (!found) return failed(cudaErrorInvalidResourceHandle);
  found->is_alive = false;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Event* found = as_event(event);
  if (!found) return failed(cudaErrorInvalidResourceHandle);
  found->recorded_ms = now_ms();
  found->is_recorded = true;
  log_line("RECORD event %p stream %p", (void*)event, (void*)stream);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!as_event(event)) return failed(cudaErrorInvalidResourceHandle);
  return is_never_ready ? failed(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (!as_event(event)) return failed(cudaErrorInvalidResourceHandle);
  log_line("HSYNC event %p", (void*)event);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  const Event *first = as_event(start), *last = as_event(end);
  if (!first || !last) return failed(cudaErrorInvalidResourceHandle);
  if (!first->is_recorded || !last->is_recorded ||
      (first->flags | last->flags) & cudaEventDisableTiming) {
    complain("elapsed time between events %p and %p: one is not recorded or takes no time",
             (void*)start, (void*)end);
    return failed(cudaErrorInvalidResourceHandle);
  }
  *ms = static_cast<float>(last->recorded_ms - first->recorded_ms);
  return cudaSuccess;
}

// ---- kernels ----

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t,
                             cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t,
                                        cudaStream_t stream) {
  return launch(kernel, grid, block, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void**) {
  return launch(kernel, how->gridDim, how->blockDim, how->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

// What `kernel<<<grid, block>>>` compiles to.
struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
static thread_local CallConfiguration call_stack[16];
static thread_local unsigned call_depth = 0;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  call_stack[call_depth++ % 16] = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  const CallConfiguration& call = call_stack[--call_depth % 16];
  *grid = call.grid;
  *block = call.block;
  *shared_bytes = call.shared_bytes;
  *static_cast<void**>(stream) = call.stream;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* binary;
  return &binary;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  kernel_names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = MAX_THREADS_OF_BLOCK;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = major() * 10;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 8;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 8;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;  // constants of kernels, which nobody runs
}

// ---- driver ----

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION_OF_DRIVER;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  static int the_context;
  *context = reinterpret_cast<CUcontext>(&the_context);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) { return static_cast<CUresult>(cudaGetDeviceCount(count)); }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return static_cast<CUresult>(
      cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  const Range* range = range_of(device_ranges, address);
  if (!range || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(value) = range->device;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY_BYTES;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* begin, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  void* reserved = reserve(bytes, PROT_NONE);
  if (!reserved) return CUDA_ERROR_OUT_OF_MEMORY;
  *begin = reinterpret_cast<CUdeviceptr>(reserved);
  std::lock_guard<std::mutex> guard(memory_mutex);
  address_ranges[*begin] = {bytes, current_device};
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr begin, size_t bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  if (!address_ranges.erase(begin)) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(begin), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  const int device = properties->location.id;
  std::unique_lock<std::mutex> guard(memory_mutex);
  const bool fits = take(device, bytes);
  const size_t used = used_bytes[device];
  guard.unlock();
  if (!fits) {
    log_line("OOM cuMemCreate %zu used %zu", bytes, used);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Range{bytes, device});
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* range = reinterpret_cast<Range*>(handle);
  std::lock_guard<std::mutex> guard(memory_mutex);
  used_bytes[range->device] -= range->bytes;
  delete range;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr begin, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  auto* range = reinterpret_cast<Range*>(handle);
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    if (!covered(address_ranges, begin, bytes) || range->bytes != bytes)
      return CUDA_ERROR_INVALID_VALUE;
    device_ranges[begin] = *range;
  }
  log_line("MALLOC %p %zu used %zu", (void*)begin, bytes, used_bytes[range->device]);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr begin, size_t bytes) {
  void* address = reinterpret_cast<void*>(begin);
  {
    std::lock_guard<std::mutex> guard(memory_mutex);
    auto at = device_ranges.lower_bound(begin);
    while (at != device_ranges.end() && at->first < begin + bytes) at = device_ranges.erase(at);
    madvise(address, bytes, MADV_DONTNEED);
    mprotect(address, bytes, PROT_NONE);
  }
  log_line("FREE %p", address);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr begin, size_t bytes, const CUmemAccessDesc*, size_t) {
  const int status = mprotect(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE);
  return status == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {
  static int the_callback;
  if (handle) *handle = reinterpret_cast<CUlogsCallbackHandle>(&the_callback);
  return CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;  // describes memory to a kernel, which nobody runs
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = missing_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- cuBLAS: a handle knows its stream; what multiplies is generated and calls stand_in_blas ----

struct BlasHandle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};
static BlasHandle* as_blas(cublasHandle_t handle) { return reinterpret_cast<BlasHandle*>(handle); }
int stand_in_blas(cublasHandle_t handle, const char* name) {
  const bool ran = run_kernel(name, as_blas(handle)->stream) == cudaSuccess;
  return ran ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
int stand_in_missing(const char* name, int error) {
  complain("%s is not written", name);
  return error;
}
cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new BlasHandle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete as_blas(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  as_blas(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void* begin, size_t bytes) {
  return stand_in::is_device_memory(begin, bytes) ? CUBLAS_STATUS_SUCCESS
                                                  : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  as_blas(handle)->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = as_blas(handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  as_blas(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = as_blas(handle)->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t,
                                        cudaDataType_t) {
  *made = static_cast<cublasLtMatmulDesc_t>(calloc(1, sizeof(cublasLtMatmulDescOpaque_t)));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
                                              const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType, uint64_t,
                                          uint64_t, int64_t) {
  *made = static_cast<cublasLtMatrixLayout_t>(calloc(1, sizeof(cublasLtMatrixLayoutOpaque_t)));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t,
                                                cublasLtMatrixLayoutAttribute_t, const void*,
                                                size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = static_cast<cublasLtMatmulPreference_t>(
      calloc(1, sizeof(cublasLtMatmulPreferenceOpaque_t)));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  free(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* num_results) {
  *results = {};
  *num_results = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                              cublasLtMatrixLayout_t, const void*, cublasLtMatrixLayout_t,
                              const void*, const void*, cublasLtMatrixLayout_t, void*,
                              cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t,
                              cudaStream_t stream) {
  const bool ran = run_kernel("cublasLtMatmul", stream) == cudaSuccess;
  return ran ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
size_t cublasLtGetVersion() { return 130100; }

}  // extern "C"
