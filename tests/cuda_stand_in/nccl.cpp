// An NCCL whose communicators move data between the processes of a job on this machine, through a
// file of shared memory a communicator in the folder STAND_IN_EXCHANGE. A call is executed when it
// is issued, and returns when it is done: the host waits as one hardware queue would, so that an
// order of calls that no single queue could fulfil hangs, and ends the process after
// STAND_IN_TIMEOUT_S with what it waited for. Without STAND_IN_EXCHANGE calls only leave their line
// in the log, and data moves within communicators of one rank.
#include "stand_in.h"

#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <vector>

namespace {

using stand_in::complain;
using stand_in::log_line;

constexpr size_t CHUNK_BYTES = 256 << 10;
constexpr int YIELDS_BEFORE_SLEEP = 64;
constexpr long SLEEP_NS = 50'000;
constexpr int EXIT_STATUS_OF_HANG = 86;
constexpr int VERSION = 22907;

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec / 1e9;
}

// A message on its way from one rank to another, a chunk at a time.
struct Channel {
  std::atomic<uint64_t> written, read;  // chunks
  uint64_t bytes;                       // of the chunk
  char data[CHUNK_BYTES];
};

// What a rank gives to collectives. Two buffers: when all ranks have arrived at step k, all are
// done reading those of step k - 1, which step k + 1 may overwrite.
struct Slot {
  std::atomic<uint64_t> arrived;  // steps
  char what[2][128];              // which call this is, to be compared
  char data[2][CHUNK_BYTES];
};

double timeout_s() { return stand_in::number("STAND_IN_TIMEOUT_S", 60); }

}  // namespace

struct ncclComm {
  std::string id;
  int size, rank;
  long number;
  Slot* slots = nullptr;         // (size), null where no data moves
  Channel* channels = nullptr;   // (size, size): from, to
  uint64_t steps = 0, splits = 0;
  std::atomic<bool> is_aborted{false};

  Channel& channel(int from, int to) { return channels[size_t(from) * size + to]; }
};

namespace {

// Calls `is_done` until it says so. Ends the process when that takes too long; false if the
// communicator was aborted meanwhile.
bool wait_until(ncclComm* comm, const std::string& what, const std::function<bool()>& is_done) {
  const double deadline = now_s() + timeout_s();
  for (int turn = 0; !is_done(); ++turn) {
    if (comm->is_aborted) return false;
    if (turn < YIELDS_BEFORE_SLEEP) {
      sched_yield();
      continue;
    }
    if (now_s() > deadline) {
      complain("hang: rank %d of the %d of communicator %ld (%s) has waited %.0f s in %s",
               comm->rank, comm->size, comm->number, comm->id.c_str(), timeout_s(), what.c_str());
      stand_in::flush_log();
      _exit(EXIT_STATUS_OF_HANG);
    }
    timespec pause{0, SLEEP_NS};
    nanosleep(&pause, nullptr);
  }
  return true;
}

size_t width_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

// ---- reductions: all ranks' values in the order of ranks, in fp32 where elements are narrower ----

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  static BFloat16 of(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (std::isnan(value)) return {uint16_t((wide >> 16) | 0x40)};
    return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};  // to the nearest, ties to even
  }
};

template <typename T> struct Arithmetic {
  using Wide = T;
  static T narrow(Wide value) { return value; }
};
template <> struct Arithmetic<BFloat16> {
  using Wide = float;
  static BFloat16 narrow(float value) { return BFloat16::of(value); }
};
template <> struct Arithmetic<_Float16> {
  using Wide = float;
  static _Float16 narrow(float value) { return static_cast<_Float16>(value); }
};

template <typename T>
void reduce(const std::vector<const char*>& parts, void* to, size_t count, ncclRedOp_t operation) {
  using Wide = typename Arithmetic<T>::Wide;
  for (size_t i = 0; i < count; ++i) {
    Wide value = reinterpret_cast<const T*>(parts[0])[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      const Wide other = reinterpret_cast<const T*>(parts[rank])[i];
      switch (operation) {
        case ncclProd: value = value * other; break;
        case ncclMax: value = other > value || other != other ? other : value; break;
        case ncclMin: value = other < value || other != other ? other : value; break;
        default: value = value + other;
      }
    }
    if (operation == ncclAvg) value = value / static_cast<Wide>(parts.size());
    static_cast<T*>(to)[i] = Arithmetic<T>::narrow(value);
  }
}

bool reduce_any(const std::vector<const char*>& parts, void* to, size_t count, ncclDataType_t type,
                ncclRedOp_t operation) {
  if (operation > ncclAvg) {
    complain("reduction %d is not written", operation);
    return false;
  }
  switch (type) {
    case ncclInt8: reduce<int8_t>(parts, to, count, operation); return true;
    case ncclUint8: reduce<uint8_t>(parts, to, count, operation); return true;
    case ncclInt32: reduce<int32_t>(parts, to, count, operation); return true;
    case ncclUint32: reduce<uint32_t>(parts, to, count, operation); return true;
    case ncclInt64: reduce<int64_t>(parts, to, count, operation); return true;
    case ncclUint64: reduce<uint64_t>(parts, to, count, operation); return true;
    case ncclFloat16: reduce<_Float16>(parts, to, count, operation); return true;
    case ncclBfloat16: reduce<BFloat16>(parts, to, count, operation); return true;
    case ncclFloat32: reduce<float>(parts, to, count, operation); return true;
    case ncclFloat64: reduce<double>(parts, to, count, operation); return true;
    default: complain("a reduction of dtype %d is not written", type); return false;
  }
}

// ---- collectives ----

// Puts this rank's part of a step where all can read it, and waits for theirs; the parts by rank.
// Empty where the communicator was aborted or the ranks' calls differ.
std::vector<const char*> exchange(ncclComm* comm, const std::string& what, const void* part,
                                  size_t bytes) {
  const uint64_t step = comm->steps++;
  const int buffer = step % 2;
  Slot& own = comm->slots[comm->rank];
  snprintf(own.what[buffer], sizeof own.what[buffer], "%s", what.c_str());
  if (bytes) memcpy(own.data[buffer], part, bytes);
  own.arrived.store(step + 1, std::memory_order_release);
  std::vector<const char*> parts;
  for (int rank = 0; rank < comm->size; ++rank) {
    Slot& slot = comm->slots[rank];
    const bool came = wait_until(comm, what + ", for rank " + std::to_string(rank), [&] {
      return slot.arrived.load(std::memory_order_acquire) > step;
    });
    if (!came) return {};
    if (strcmp(slot.what[buffer], own.what[buffer]) != 0) {
      complain("communicator %ld (%s): rank %d calls %s but rank %d calls %s", comm->number,
               comm->id.c_str(), comm->rank, own.what[buffer], rank, slot.what[buffer]);
      return {};
    }
    parts.push_back(slot.data[buffer]);
  }
  return parts;
}

struct Call {
  std::string name;
  const void* from;
  void* to;
  size_t count;  // as given to NCCL: of what a rank sends, for ReduceScatter of what it receives
  ncclDataType_t type;
  int peer = -1;  // the root, where there is one
  ncclRedOp_t operation = ncclSum;
  ncclComm* comm;
  cudaStream_t stream;

  size_t bytes() const { return count * width_of(type); }
  bool gathers() const { return name == "AllGather" || name == "ReduceScatter" || name == "AlltoAll"; }
  bool is_message() const { return name == "Send" || name == "Recv"; }
  size_t read_bytes() const {
    if (name == "Recv" || (name == "Broadcast" && comm->rank != peer)) return 0;
    return bytes() * (name == "ReduceScatter" || name == "AlltoAll" ? comm->size : 1);
  }
  size_t written_bytes() const {
    if (name == "Send" || (name == "Reduce" && comm->rank != peer)) return 0;
    return bytes() * (name == "AllGather" || name == "AlltoAll" ? comm->size : 1);
  }
  std::string text() const {
    return name + " of " + std::to_string(count) + " elements of dtype " + std::to_string(type) +
           (peer >= 0 ? " with " + std::to_string(peer) : "") + ", reduction " +
           std::to_string(operation);
  }
};

// Every rank's values of a collective, chunk by chunk. Where a call has a part for each rank the
// chunks of part after part.
ncclResult_t run_collective(const Call& call) {
  ncclComm* comm = call.comm;
  const size_t width = width_of(call.type);
  const char* from = static_cast<const char*>(call.from);
  char* to = static_cast<char*>(call.to);
  const bool has_parts = call.name == "ReduceScatter" || call.name == "AlltoAll";
  const bool reduces = call.name == "AllReduce" || call.name == "ReduceScatter" ||
                       call.name == "Reduce";
  const int num_parts = has_parts ? comm->size : 1;
  for (int part = 0; part < num_parts; ++part) {
    size_t start = 0;
    do {
      const size_t bytes = std::min(CHUNK_BYTES, call.bytes() - start);
      const bool gives = call.name != "Broadcast" || comm->rank == call.peer;
      const auto parts = exchange(comm, call.text(), from + part * call.bytes() + start,
                                  gives ? bytes : 0);
      if (parts.empty()) return ncclInternalError;
      if (reduces) {
        const bool takes = call.name == "AllReduce" ||
                           comm->rank == (call.name == "Reduce" ? call.peer : part);
        if (takes && !reduce_any(parts, to + start, bytes / width, call.type, call.operation))
          return ncclInvalidArgument;
      } else if (call.name == "AllGather") {
        for (int rank = 0; rank < comm->size; ++rank)
          memcpy(to + rank * call.bytes() + start, parts[rank], bytes);
      } else if (call.name == "AlltoAll") {
        if (comm->rank == part)
          for (int rank = 0; rank < comm->size; ++rank)
            memcpy(to + rank * call.bytes() + start, parts[rank], bytes);
      } else if (comm->rank != call.peer || call.from != call.to) {
        memcpy(to + start, parts[call.peer], bytes);
      }
      start += bytes;
    } while (start < call.bytes());
  }
  return ncclSuccess;
}

// ---- messages: all of a group under way at the same time ----

class Message {
 public:
  explicit Message(const Call& call)
      : call_(call),
        channel_(call.name == "Send" ? call.comm->channel(call.comm->rank, call.peer)
                                     : call.comm->channel(call.peer, call.comm->rank)) {}

  // Moves what can be moved now. A message is sent when its receiver has taken all of it.
  bool is_done() {
    const uint64_t written = channel_.written.load(std::memory_order_acquire);
    const uint64_t read = channel_.read.load(std::memory_order_acquire);
    const bool is_free = written == read;
    if (call_.name == "Send") {
      if (is_free && moved_ == call_.bytes()) return true;
      if (!is_free || moved_ == call_.bytes()) return false;
      channel_.bytes = std::min(CHUNK_BYTES, call_.bytes() - moved_);
      memcpy(channel_.data, static_cast<const char*>(call_.from) + moved_, channel_.bytes);
      moved_ += channel_.bytes;
      channel_.written.store(written + 1, std::memory_order_release);
      return false;
    }
    if (is_free) return false;
    const size_t expected = std::min(CHUNK_BYTES, call_.bytes() - moved_);
    if (channel_.bytes != expected) {
      is_wrong = true;
      complain("communicator %ld: rank %d receives %zu bytes from rank %d, which sends %zu",
               call_.comm->number, call_.comm->rank, expected, call_.peer, size_t(channel_.bytes));
      return true;
    }
    memcpy(static_cast<char*>(call_.to) + moved_, channel_.data, expected);
    moved_ += expected;
    channel_.read.store(read + 1, std::memory_order_release);
    return moved_ == call_.bytes();
  }

  // Whether both go the same way.
  bool shares_way_with(const Message& other) const {
    return &channel_ == &other.channel_ && call_.name == other.call_.name;
  }

  bool is_wrong = false;

 private:
  Call call_;
  Channel& channel_;
  size_t moved_ = 0;
};

ncclResult_t run_messages(const std::vector<Call>& calls) {
  if (calls.empty()) return ncclSuccess;
  std::list<Message> waiting(calls.begin(), calls.end());
  std::string what = "a group of";
  for (const Call& call : calls) what += " " + call.name + "(" + std::to_string(call.peer) + ")";
  bool is_wrong = false;
  const bool came = wait_until(calls[0].comm, what, [&] {
    for (auto at = waiting.begin(); at != waiting.end();) {
      // Several messages from one rank to another follow one another.
      const bool is_first = std::none_of(waiting.begin(), at, [&](const Message& earlier) {
        return earlier.shares_way_with(*at);
      });
      if (is_first && at->is_done()) {
        is_wrong |= at->is_wrong;
        at = waiting.erase(at);
      } else {
        ++at;
      }
    }
    return waiting.empty();
  });
  return came && !is_wrong ? ncclSuccess : ncclInternalError;
}

// ---- issuing calls ----

thread_local int group_depth = 0;
thread_local std::vector<Call> group;

ncclResult_t run(const std::vector<Call>& calls) {
  std::vector<Call> messages;
  for (const Call& call : calls)
    if (call.is_message() && call.comm->slots && call.bytes()) messages.push_back(call);
  if (ncclResult_t error = run_messages(messages)) return error;
  for (const Call& call : calls) {
    if (call.is_message()) continue;
    if (call.comm->slots) {
      if (ncclResult_t error = run_collective(call)) return error;
    } else if (call.comm->size == 1 && call.from != call.to && stand_in::moves(call.bytes())) {
      memmove(call.to, call.from, call.bytes());
    }
  }
  return ncclSuccess;
}

ncclResult_t issue(const Call& call) {
  log_line("NCCL %s comm %ld count %zu dtype %d peer %d stream %p read %p %zu write %p %zu redop %d",
           call.name.c_str(), call.comm->number, call.count, call.type, call.peer,
           (void*)call.stream, call.from, call.read_bytes(), call.to, call.written_bytes(),
           call.operation);
  if (!stand_in::is_device_memory(call.from, call.read_bytes()) ||
      !stand_in::is_device_memory(call.to, call.written_bytes())) {
    complain("%s reads %p or writes %p: not memory of a device", call.text().c_str(), call.from,
             call.to);
    return ncclInvalidArgument;
  }
  if (call.peer >= call.comm->size) {
    complain("%s: the communicator has %d ranks", call.text().c_str(), call.comm->size);
    return ncclInvalidArgument;
  }
  if (group_depth > 0) {
    group.push_back(call);
    return ncclSuccess;
  }
  return run({call});
}

// ---- communicators ----

std::mutex live_mutex;
std::vector<ncclComm*> live;

void log_communicator(const ncclComm* comm) {
  log_line("COMM %ld id %s size %d rank %d", comm->number, comm->id.c_str(), comm->size,
           comm->rank);
}

// Maps the communicator's shared memory and waits for all its ranks.
ncclResult_t join(ncclComm* comm) {
  const char* folder = getenv("STAND_IN_EXCHANGE");
  if (!folder || !*folder) return ncclSuccess;
  const size_t slots_bytes = sizeof(Slot) * comm->size;
  const size_t bytes = slots_bytes + sizeof(Channel) * comm->size * comm->size;
  const std::string path = std::string(folder) + "/" + comm->id;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) {
    complain("%s cannot be made: %s", path.c_str(), strerror(errno));
    return ncclSystemError;
  }
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return ncclSystemError;
  comm->slots = static_cast<Slot*>(shared);
  comm->channels = reinterpret_cast<Channel*>(static_cast<char*>(shared) + slots_bytes);
  if (exchange(comm, "the start of the communicator", nullptr, 0).empty()) return ncclInternalError;
  if (comm->rank == 0) unlink(path.c_str());
  return ncclSuccess;
}

ncclResult_t make(ncclComm_t* made, const std::string& id, int size, int rank) {
  static std::atomic<long> next{0};
  ncclComm* comm = *made = new ncclComm{id, size, rank, next++};
  stand_in::take_on_current_device(stand_in::number("STAND_IN_COMMUNICATOR_BYTES", 0));
  log_communicator(comm);
  {
    std::lock_guard<std::mutex> guard(live_mutex);
    live.push_back(comm);
  }
  return join(comm);
}

void forget(ncclComm* comm) {
  std::lock_guard<std::mutex> guard(live_mutex);
  live.erase(std::remove(live.begin(), live.end(), comm), live.end());
}

std::string text_of(const ncclUniqueId& id) {
  // One rank's made-up store of a larger job gives ids of other bytes.
  std::string text(id.internal, strnlen(id.internal, 32));
  std::replace(text.begin(), text.end(), '/', '_');
  return text;
}

}  // namespace

void stand_in::log_communicators() {
  std::lock_guard<std::mutex> guard(live_mutex);
  for (const ncclComm* comm : live) log_communicator(comm);
}

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = VERSION;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> next{0};
  *id = {};
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  snprintf(id->internal, sizeof id->internal, "id%x_%x_%lx", next++, getpid(),
           long(time.tv_nsec));
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return make(comm, text_of(id), size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return make(comm, text_of(id), size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* id,
                                      ncclConfig_t*) {
  return make(comm, text_of(*id), size, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made,
                           ncclConfig_t*) {
  struct Part {
    int color, key;
  } own{color, key};
  *made = nullptr;
  const std::string id = parent->id + "." + std::to_string(parent->splits++);
  log_line("SPLIT comm %ld color %d key %d", parent->number, color, key);
  std::vector<std::pair<int, int>> ranks;  // of this color: key, rank of the parent
  if (parent->slots) {
    const auto parts = exchange(parent, "a split", &own, sizeof own);
    if (parts.empty()) return ncclInternalError;
    for (int rank = 0; rank < parent->size; ++rank) {
      const Part* part = reinterpret_cast<const Part*>(parts[rank]);
      if (part->color == color) ranks.emplace_back(part->key, rank);
    }
  } else {
    complain("ncclCommSplit needs STAND_IN_EXCHANGE: other ranks' colors are not known");
    return ncclInvalidUsage;
  }
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(ranks.begin(), ranks.end());
  int rank = 0;
  while (ranks[rank].second != parent->rank) ++rank;
  return make(made, id + "." + std::to_string(color), ranks.size(), rank);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  log_line("DESTROY %ld", comm->number);
  forget(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  log_line("ABORT %ld", comm->number);
  forget(comm);
  comm->is_aborted = true;  // another thread may still wait in it
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t error) {
  return error ? "refused by the CUDA stand-in; stderr says why" : "no error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclMemAlloc(void** begin, size_t bytes) {
  return cudaMalloc(begin, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* begin) {
  return cudaFree(begin) ? ncclUnhandledCudaError : ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  log_line("GROUP start");
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  log_line("GROUP end");
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth > 0) return ncclSuccess;
  const std::vector<Call> calls = std::move(group);
  group.clear();
  return run(calls);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue({"AllReduce", from, to, count, type, -1, operation, comm, stream});
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
  return issue({"Reduce", from, to, count, type, root, operation, comm, stream});
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue({"ReduceScatter", from, to, count, type, -1, operation, comm, stream});
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({"AllGather", from, to, count, type, -1, ncclSum, comm, stream});
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return issue({"AlltoAll", from, to, count, type, -1, ncclSum, comm, stream});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({"Broadcast", from, to, count, type, root, ncclSum, comm, stream});
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return issue({"Send", from, nullptr, count, type, peer, ncclSum, comm, stream});
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({"Recv", nullptr, to, count, type, peer, ncclSum, comm, stream});
}

}  // extern "C"
