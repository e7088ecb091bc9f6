/* Crossdock: version of the library. CMake reads the three numbers from this file; they stand
 * nowhere else. */
#ifndef CROSSDOCK_VERSION_H_
#define CROSSDOCK_VERSION_H_

#include <crossdock/status.h>

#ifdef __cplusplus
extern "C" {
#endif

#define XD_VERSION_MAJOR 0
#define XD_VERSION_MINOR 1
#define XD_VERSION_PATCH 0
#define XD_VERSION       (XD_VERSION_MAJOR * 10000 + XD_VERSION_MINOR * 100 + XD_VERSION_PATCH)

/* Version of the library that is loaded, as XD_VERSION spells it; it may be newer than the header.
 * Never fails. */
XD_API int32_t xd_version(void);

/* Parts of the library that may be absent from a build or unable to run on this machine. */
typedef enum xd_feature {
  /* The CPU executor. */
  XD_FEATURE_CPU = 0,
  /* The CUDA executor. */
  XD_FEATURE_CUDA = 1,
  /* Expert parallelism between hosts, over libfabric. */
  XD_FEATURE_NETWORK = 2,
  /* Communication overlapped with GEMM. */
  XD_FEATURE_GEMM = 3,
  /* cuBLASMp, for products over ranks by the algorithms named XD_GEMM_ALGO_CUBLASMP. */
  XD_FEATURE_CUBLASMP = 4,
  /* Wires of combine other than XD_EP_WIRE_SAME on CUDA devices; the CPU executor has them. */
  XD_FEATURE_CUDA_WIRE = 5,
  /* Groups with num_logical_experts on CUDA devices; the CPU executor has them. */
  XD_FEATURE_CUDA_PLACEMENT = 6,
  /* Low latency on CUDA devices of several machines, without masks and wires. It needs
   * XD_FEATURE_NETWORK as well. */
  XD_FEATURE_CUDA_LL_MACHINES = 7
} xd_feature;

/* 1 if the feature can be used in this process now, else 0. With `reason` not NULL, *reason gets a
 * static text: what is missing, or "available". An unknown feature answers 0. Never fails, never
 * blocks. */
XD_API int32_t xd_feature_available(xd_feature feature, const char** reason);

#ifdef __cplusplus
}
#endif

#endif /* CROSSDOCK_VERSION_H_ */
