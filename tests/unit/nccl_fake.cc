// A library with the functions that are looked up in NCCL. Tests decide what they do.
// NCCL_FAKE_PARTIAL leaves some out.
extern "C" {

int ncclCommCount(void* comm, int* count) {
  *count = static_cast<int*>(comm)[0];
  return 0;
}
int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<int*>(comm)[1];
  return 0;
}
int ncclCommCuDevice(void* comm, int* device) {
  *device = static_cast<int*>(comm)[2];
  return static_cast<int*>(comm)[3];  // the result
}
const char* ncclGetErrorString(int) { return "fake reason"; }

#if !defined(NCCL_FAKE_PARTIAL)
int ncclCommGetAsyncError(void*, int* error) {
  *error = 0;
  return 0;
}
int ncclAllGather(const void*, void*, unsigned long, int, void*, void*) { return 5; }
#endif
}
