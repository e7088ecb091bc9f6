// A library with the functions that are looked up in cuBLASMp and in its NCCL. It computes nothing,
// and writes down what it is asked for. CUBLASMP_FAKE_OLD_NCCL makes its NCCL too old,
// CUBLASMP_FAKE_PARTIAL leaves a function out.
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

namespace {

std::string text;     // what has been called, ';' behind each
std::string fails;    // the function that fails
int with_status = 6;  // and its result
std::size_t device_bytes = 100;

template <class... Parts>
int note(const char* name, const Parts&... parts) {
  std::ostringstream out;
  out << name;
  ((out << ' ' << parts), ...);
  text += out.str() + ";";
  return fails == name ? with_status : 0;
}

void* made(std::intptr_t number) {
  return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr)
}
long number(const void* object) {
  return static_cast<long>(reinterpret_cast<std::intptr_t>(object));
}
int grids = 0, matrices = 0;

}  // namespace

extern "C" {

// ---- For tests ----
const char* fake_text() { return text.c_str(); }
void fake_begin(const char* failing, int status, std::size_t bytes) {
  text.clear();
  fails = failing;
  with_status = status;
  device_bytes = bytes;
  grids = matrices = 0;
}

// ---- NCCL ----
struct FakeId {
  char bytes[128];
};
int ncclGetVersion(int* version) {
#if defined(CUBLASMP_FAKE_OLD_NCCL)
  *version = 22809;
#else
  *version = 22902;
#endif
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
int ncclCommAbort(void* comm) { return note("CommAbort", number(comm)); }
int ncclCommCount(void*, int*) { return 0; }
int ncclCommUserRank(void*, int*) { return 0; }
int ncclCommCuDevice(void*, int*) { return 0; }
struct FakeProperties {
  std::size_t size;
  unsigned magic, version;
  int numbers[4];
  bool device_functions, multimem;
};
int ncclCommQueryProperties(void*, FakeProperties* properties) {
  if (properties->size != 56 || properties->magic != 0xcafebeef) return 4;
  properties->multimem = false;
  return 0;
}

// ---- cuBLASMp ----
int cublasMpGetVersion(int* version) {
  *version = 1000;
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
  *on_device = device_bytes;
  *on_host = 8;
  if (a == nullptr || b == nullptr || d == nullptr) return 3;
  return note("bufferSize", m, n, k, c != nullptr ? "c" : "-");
}
#if !defined(CUBLASMP_FAKE_PARTIAL)
int cublasMpMatmul(void*, void*, std::int64_t m, std::int64_t n, std::int64_t k, const void* alpha,
                   const void* a, std::int64_t ia, std::int64_t ja, void*, const void* b,
                   std::int64_t ib, std::int64_t jb, void*, const void* beta, const void* c,
                   std::int64_t ic, std::int64_t jc, void*, void* d, std::int64_t id,
                   std::int64_t jd, void*, void* memory, std::size_t bytes, void*, std::size_t) {
  if (ia * ja * ib * jb * ic * jc * id * jd != 1) return 3;
  return note("Matmul", m, n, k, *static_cast<const float*>(alpha), number(a), number(b),
              *static_cast<const float*>(beta), number(c), number(d), number(memory), bytes);
}
#endif
}
