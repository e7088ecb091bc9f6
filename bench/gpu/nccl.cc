#include "nccl.h"

#include <dlfcn.h>

#include <stdexcept>

#include "../../tests/support/open_nccl.h"

namespace bench::gpu {
namespace {

// NCCL's types and functions are declared here, so that neither building nor starting needs NCCL.
// They are those of nccl.h, stable since 2.7.
struct UniqueId {
  char internal[128];
};
using Communicator = ncclComm*;
constexpr int kInt8 = 0;  // an ncclDataType_t
constexpr int kSum = 0;   // an ncclRedOp_t

struct Library {
  NcclState state;
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank)(Communicator*, int, UniqueId, int) = nullptr;
  int (*comm_destroy)(Communicator) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
  int (*recv)(void*, std::size_t, int, int, Communicator, cudaStream_t) = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, int, Communicator, cudaStream_t) = nullptr;
  int (*reduce_scatter)(const void*, void*, std::size_t, int, int, Communicator,
                        cudaStream_t) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, Communicator,
                    cudaStream_t) = nullptr;
  const char* (*error_string)(int) = nullptr;

  void check(int result, const char* what) const {
    if (result == 0) return;
    throw std::runtime_error(std::string(what) + ": " + error_string(result));
  }
};

template <class Function>
void load(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
}

Library load_library() {
  Library library;
  void* const handle = xd::test::open_nccl();
  if (handle == nullptr) {
    library.state.unavailable = "libnccl.so.2 was not found (XD_NCCL_LIB may name it)";
    return library;
  }
  std::string missing;
  load(handle, "ncclGetVersion", library.get_version, missing);
  load(handle, "ncclGetUniqueId", library.get_unique_id, missing);
  load(handle, "ncclCommInitRank", library.comm_init_rank, missing);
  load(handle, "ncclCommDestroy", library.comm_destroy, missing);
  load(handle, "ncclGroupStart", library.group_start, missing);
  load(handle, "ncclGroupEnd", library.group_end, missing);
  load(handle, "ncclSend", library.send, missing);
  load(handle, "ncclRecv", library.recv, missing);
  load(handle, "ncclAllGather", library.all_gather, missing);
  load(handle, "ncclReduceScatter", library.reduce_scatter, missing);
  load(handle, "ncclAllReduce", library.all_reduce, missing);
  load(handle, "ncclGetErrorString", library.error_string, missing);
  if (!missing.empty()) {
    library.state.unavailable = "libnccl.so.2 lacks " + missing;
    return library;
  }
  int version = 0;
  library.check(library.get_version(&version), "ncclGetVersion");
  library.state.version = std::to_string(version / 10000) + "." +
                          std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
  return library;
}

const Library& nccl() {
  static const Library library = load_library();
  return library;
}

// The world is never freed: it stays with the process, like NCCL's threads. Each rank of this
// process uses one entry.
struct World {
  int ranks = 0;
  Communicator of[kMaxRanks] = {};
};
Communicator communicator(const Rank& at) {
  static World worlds[kMaxRanks + 1];
  Communicator& mine = worlds[at.ranks].of[at.rank];
  if (mine != nullptr) return mine;  // then every rank has one: making them is collective
  UniqueId id{};
  if (at.rank == 0) nccl().check(nccl().get_unique_id(&id), "ncclGetUniqueId");
  at.broadcast(std::as_writable_bytes(std::span(id.internal)));
  nccl().check(nccl().comm_init_rank(&mine, at.ranks, id, at.rank), "ncclCommInitRank");
  return mine;
}

// ncclDataType_t
int type_of(Element element) {
  switch (element) {
    case Element::fp32:
      return 7;
    case Element::fp16:
      return 6;
    default:
      return 9;
  }
}

}  // namespace

const NcclState& nccl_state() { return nccl().state; }

NcclCollectives::NcclCollectives(const Rank& at)
    : comm_(communicator(at)), stream_(at.device.stream()) {}

void NcclCollectives::all_gather(const void* in, void* out, std::size_t count,
                                 Element element) const {
  nccl().check(nccl().all_gather(in, out, count, type_of(element), comm_, stream_),
               "ncclAllGather");
}

void NcclCollectives::reduce_scatter(const void* in, void* out, std::size_t count,
                                     Element element) const {
  nccl().check(nccl().reduce_scatter(in, out, count, type_of(element), kSum, comm_, stream_),
               "ncclReduceScatter");
}

void NcclCollectives::all_reduce(const void* in, void* out, std::size_t count,
                                 Element element) const {
  nccl().check(nccl().all_reduce(in, out, count, type_of(element), kSum, comm_, stream_),
               "ncclAllReduce");
}

std::vector<double> measure_nccl(const RankContext& at, std::size_t bytes_per_peer) {
  const Communicator comm = communicator(at);
  const std::size_t peers = static_cast<std::size_t>(at.ranks) - 1;
  const Stream open(Pool::open);
  const Memory sent(nullptr, open, bytes_per_peer * peers);
  const Memory received(nullptr, open, bytes_per_peer * peers);
  const auto all_to_all = [&] {
    nccl().check(nccl().group_start(), "ncclGroupStart");
    for (std::size_t i = 0; i < peers; ++i) {
      const int step = static_cast<int>(i) + 1;
      const int to = (at.rank + step) % at.ranks;
      const int from = (at.rank + at.ranks - step) % at.ranks;
      nccl().check(
          nccl().send(sent.data() + i * bytes_per_peer, bytes_per_peer, kInt8, to, comm, at.stream),
          "ncclSend");
      nccl().check(nccl().recv(received.data() + i * bytes_per_peer, bytes_per_peer, kInt8, from,
                               comm, at.stream),
                   "ncclRecv");
    }
    nccl().check(nccl().group_end(), "ncclGroupEnd");
  };
  all_to_all();  // connects, which must not happen behind a waiting kernel
  at.settle("NCCL");
  std::vector<double> slowest = at.time(at.iterations(), [&](int) { all_to_all(); });
  at.settle("NCCL");  // no rank frees while a peer may still be sending
  return slowest;
}

}  // namespace bench::gpu
