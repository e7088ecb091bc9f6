/* Crossdock: TransformerEngine's windows, by which its functions are told of symmetric memory.
 * Crossdock finds symmetric memory by its address, so a window here is an address. C++17. */
#ifndef CROSSDOCK_COMPAT_TE_COMM_WINDOW_H_
#define CROSSDOCK_COMPAT_TE_COMM_WINDOW_H_

#include <stdint.h>

/* Of NCCL. */
struct ncclWindow_vidmem;

#ifndef TRANSFORMER_ENGINE_COMM_WINDOW_H_
typedef struct {
  /* NULL: the tensor's own address counts. */
  struct ncclWindow_vidmem* window;
  uint64_t offset;
  /* The same for the tensor's scales. */
  struct ncclWindow_vidmem* scale_window;
  uint64_t scale_offset;
} NVTECommWindow;
#endif

namespace crossdock::te {

/* A window that begins at `base`, which is at an even address in memory from xd_mem_alloc or
 * xd_mem_register (of ep_comm(), see te_ep.h). A tensor that comes with this window lies at base +
 * offset, whatever its own address. It needs no freeing. */
inline ncclWindow_vidmem* window(void* base) {
  return reinterpret_cast<ncclWindow_vidmem*>(static_cast<char*>(base) + 1);
}

namespace detail {

/* The address of a tensor that has come with a window. Windows of NCCL's, which are at even
 * addresses, do not tell what they stand for: there the tensor's own address counts. */
inline void* address_in(ncclWindow_vidmem* window, uint64_t offset, void* own) {
  if ((reinterpret_cast<uintptr_t>(window) & 1u) == 0) return own;
  return reinterpret_cast<char*>(window) - 1 + offset;
}

}  // namespace detail
}  // namespace crossdock::te

#endif /* CROSSDOCK_COMPAT_TE_COMM_WINDOW_H_ */
