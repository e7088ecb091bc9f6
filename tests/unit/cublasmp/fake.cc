// A library with the functions that are looked up in cuBLASMp, in its NCCL and in its cuBLASLt. It
// computes nothing, and writes down what it is asked for; a function may fail, or wait until NCCL's
// communicator is ended. CUBLASMP_FAKE_PARTIAL leaves a function out, CUBLASMP_FAKE_UNBOUND calls
// one that is nowhere, and CUBLASMP_FAKE_NO_REVOKE has an NCCL without ncclCommRevoke.
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>

namespace {

std::mutex mutex;
std::condition_variable changed;
std::string text;     // the functions that have been called, ';' behind each
std::string fails;    // the function that fails
int with_status = 6;  // and its result
std::string waits;    // the function that waits until the communicator is ended
bool ended = false;   // it has been
std::size_t device_bytes = 100, host_bytes = 8;
std::byte* host_memory = nullptr;  // of the last product
std::size_t host_memory_bytes = 0;

// A wait that nothing ends would keep the test's program from ending.
constexpr auto kLongest = std::chrono::seconds(60);

template <class... Parts>
int note(const char* name, const Parts&... parts) {
  std::ostringstream out;
  out << name;
  ((out << ' ' << parts), ...);
  std::unique_lock lock(mutex);
  text += out.str() + ";";
  if (waits == name) changed.wait_for(lock, kLongest, [] { return ended; });
  return fails == name ? with_status : 0;
}

int note_end(const char* name, long communicator) {
  const int status = note(name, communicator);
  const std::lock_guard lock(mutex);
  ended = true;
  changed.notify_all();
  return status;
}

void* made(std::intptr_t number) {
  return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr)
}
long number(const void* object) {
  return static_cast<long>(reinterpret_cast<std::intptr_t>(object));
}
int grids = 0, matrices = 0;

// Of this library as cuBLASMp, NCCL and cuBLASLt.
int version = 1000, nccl_version = 22902;
std::size_t lt_version = 130100;

}  // namespace

extern "C" {

// ---- For tests ----
// Valid until the calling thread's next call.
const char* fake_text() {
  thread_local std::string copy;
  const std::lock_guard lock(mutex);
  copy = text;
  return copy.c_str();
}
void fake_begin(const char* failing, int status, std::size_t bytes) {
  const std::lock_guard lock(mutex);
  text.clear();
  fails = failing;
  with_status = status;
  device_bytes = bytes;
  host_bytes = 8;
  grids = matrices = 0;
}
// From now on `waiting` waits.
void fake_wait(const char* waiting) {
  const std::lock_guard lock(mutex);
  waits = waiting;
  ended = false;
}
void fake_end_waits() {
  const std::lock_guard lock(mutex);
  waits.clear();
  ended = true;
  changed.notify_all();
}
void fake_need_host_memory(std::size_t bytes) {
  const std::lock_guard lock(mutex);
  host_bytes = bytes;
}
void fake_versions(int mp, int nccl, std::size_t lt) {
  version = mp;
  nccl_version = nccl;
  lt_version = lt;
}
// Reads all that the last product was given on the host: how many bytes are as it has left them.
std::size_t fake_read_host_memory() {
  std::size_t same = 0;
  for (std::size_t i = 0; i < host_memory_bytes; ++i)
    same += host_memory[i] == std::byte{7} ? 1 : 0;
  return same;
}

// ---- cuBLASLt ----
std::size_t cublasLtGetVersion() { return lt_version; }

// ---- NCCL ----
struct FakeId {
  char bytes[128];
};
int ncclGetVersion(int* found) {
  *found = nccl_version;
  return 0;
}
const char* ncclGetErrorString(int) { return "fake reason"; }
int ncclGetUniqueId(FakeId* id) {
  id->bytes[0] = 'u';
  return 0;
}
int ncclCommInitRank(void** comm, int ranks, FakeId id, int rank) {
  *comm = made(77);
  return note("CommInitRank", ranks, id.bytes[0], rank);
}
int ncclCommDestroy(void* comm) { return note("CommDestroy", number(comm)); }
int ncclCommAbort(void* comm) { return note_end("CommAbort", number(comm)); }
#if !defined(CUBLASMP_FAKE_NO_REVOKE)
int ncclCommRevoke(void* comm, int flags) {
  return flags != 0 ? 4 : note_end("CommRevoke", number(comm));
}
#endif
int ncclCommCount(void*, int*) { return 0; }
int ncclCommUserRank(void*, int*) { return 0; }
int ncclCommCuDevice(void*, int*) { return 0; }
struct FakeProperties {
  std::size_t size;
  unsigned magic, version;
  int numbers[4];
  bool device_functions, multimem;
  std::uint8_t gin;
};
int ncclCommQueryProperties(void*, FakeProperties* properties) {
  if (properties->size != sizeof(FakeProperties) || properties->version != 22902) return 4;
  if (properties->magic != 0xcafebeef) return 4;
  properties->multimem = false;
  return 0;
}

#if defined(CUBLASMP_FAKE_UNBOUND)
int fake_that_is_nowhere();
int fake_unbound() { return fake_that_is_nowhere(); }
#endif

// ---- cuBLASMp ----
int cublasMpGetVersion(int* found) {
  *found = version;
  return 0;
}
const char* cublasMpGetStatusString(int) { return "fake reason"; }
int cublasMpCreate(void** handle, void*) {
  *handle = made(5);
  return note("Create");
}
int cublasMpDestroy(void*) { return note("Destroy"); }
int cublasMpSetStream(void*, void* stream) { return note("SetStream", number(stream)); }
int cublasMpGridCreate(std::int64_t rows, std::int64_t columns, int layout, void* comm,
                       void** grid) {
  *grid = made(10 + ++grids);
  return note("GridCreate", rows, columns, layout, number(comm));
}
int cublasMpGridDestroy(void* grid) { return note("GridDestroy", number(grid)); }
int cublasMpBufferRegister(void* grid, void* memory, std::size_t bytes) {
  return note("BufferRegister", number(grid), number(memory), bytes);
}
int cublasMpBufferDeregister(void* grid, void* memory) {
  return note("BufferDeregister", number(grid), number(memory));
}
int cublasMpMalloc(void* grid, void** memory, std::size_t bytes) {
  *memory = made(99);
  const int status = note("Malloc", number(grid), bytes);
  if (status != 0) *memory = nullptr;
  return status;
}
int cublasMpFree(void* grid, void* memory) { return note("Free", number(grid), number(memory)); }
int cublasMpMatrixDescriptorCreate(std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                   std::int64_t, std::int64_t, std::int64_t, int, void*,
                                   void** matrix) {
  *matrix = made(20 + ++matrices);
  return 0;
}
int cublasMpMatrixDescriptorInit(std::int64_t rows, std::int64_t columns, std::int64_t block_rows,
                                 std::int64_t block_columns, std::int64_t, std::int64_t,
                                 std::int64_t pitch, int type, void* grid, void* matrix) {
  return note("Matrix", number(matrix), rows, columns, block_rows, block_columns, pitch, type,
              number(grid));
}
int cublasMpMatrixDescriptorDestroy(void* matrix) { return note("MatrixDestroy", number(matrix)); }
int cublasMpMatmulDescriptorCreate(void** operation, int) {
  *operation = made(30);
  return 0;
}
int cublasMpMatmulDescriptorInit(void*, int compute) { return note("Operation", compute); }
int cublasMpMatmulDescriptorDestroy(void*) { return note("OperationDestroy"); }
int cublasMpMatmulDescriptorSetAttribute(void*, int attribute, const void* value,
                                         std::size_t bytes) {
  if (bytes == sizeof(int)) return note("Set", attribute, *static_cast<const int*>(value));
  return note("Set", attribute, number(*static_cast<void* const*>(value)));
}
int cublasMpMatmul_bufferSize(void*, void*, std::int64_t m, std::int64_t n, std::int64_t k,
                              const void*, const void* a, std::int64_t, std::int64_t, void*,
                              const void* b, std::int64_t, std::int64_t, void*, const void*,
                              const void* c, std::int64_t, std::int64_t, void*, void* d,
                              std::int64_t, std::int64_t, void*, std::size_t* on_device,
                              std::size_t* on_host) {
  {
    const std::lock_guard lock(mutex);
    *on_device = device_bytes;
    *on_host = host_bytes;
  }
  if (a == nullptr || b == nullptr || d == nullptr) return 3;
  return note("bufferSize", m, n, k, c != nullptr ? "c" : "-");
}
#if !defined(CUBLASMP_FAKE_PARTIAL)
int cublasMpMatmul(void*, void*, std::int64_t m, std::int64_t n, std::int64_t k, const void* alpha,
                   const void* a, std::int64_t ia, std::int64_t ja, void*, const void* b,
                   std::int64_t ib, std::int64_t jb, void*, const void* beta, const void* c,
                   std::int64_t ic, std::int64_t jc, void*, void* d, std::int64_t id,
                   std::int64_t jd, void*, void* memory, std::size_t bytes, void* on_host,
                   std::size_t on_host_bytes) {
  if (ia * ja * ib * jb * ic * jc * id * jd != 1 || on_host_bytes < host_bytes) return 3;
  host_memory = static_cast<std::byte*>(on_host);
  host_memory_bytes = on_host_bytes;
  std::memset(on_host, 7, on_host_bytes);
  return note("Matmul", m, n, k, *static_cast<const float*>(alpha), number(a), number(b),
              *static_cast<const float*>(beta), number(c), number(d), number(memory), bytes);
}
#endif
}
