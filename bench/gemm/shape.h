// The products that are measured: those of known models' layers, and any others.
#pragma once

#include <crossdock/gemm.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

// A product of every rank: [M,K] times [K,N], with a transfer before it or behind it.
struct GemmShape {
  std::string name;
  xd_gemm_operation operation;
  std::int64_t n, k;  // of a rank
};

// Reads MODEL (all layers), MODEL.LAYER, or OPERATION:NxK with sizes of a rank. Throws
// std::invalid_argument with what is expected.
std::vector<GemmShape> read_shapes(const std::string& text, int ranks);

const char* name_of(xd_gemm_operation operation);

}  // namespace bench
