// Products of spread matrices as a family of operations that take turns (turn/family.h): records,
// and how two of them compare.
#pragma once

#include <crossdock/gemm.h>

#include <cstdint>
#include <string>

#include "comm/operations.h"
#include "turn/entry.h"
#include "turn/operation_error.h"
#include "turn/peer_address.h"

namespace xd::gemm {

// The names of the C functions without their prefix, in the order of xd_gemm_operation.
inline constexpr const char* kOperationNames[] = {"all_gather", "reduce_scatter", "all_reduce",
                                                  "bulk", "start_all_gather"};

inline constexpr CollectiveCall kCreateContext{"xd_gemm_context_create"};

// How the elements of an operand in fp8 are scaled.
enum class Scaling : std::uint8_t { none, tensor, rows, blocks };

enum RecordFlags : std::uint8_t {
  kTransposeA = 1 << 0,
  kTransposeB = 1 << 1,
  kReduceBiasGrad = 1 << 2,
  kBulkReduces = 1 << 3,  // bulk: the collective is reduce_scatter
  kAllowTf32 = 1 << 4,    // and a is float32
  // all_reduce: what else a rank wants of the sums. It decides how they may travel.
  kWantsAmax = 1 << 5,
  kWantsBiasGrad = 1 << 6,
  kWantsPreActivation = 1 << 7,
};

// The tensors that a call by cuBLASMp gives beside a, b and d. It decides the type in which the
// terms of a sum travel, and what cuBLASMp is told to store: equal on all ranks.
enum GivenFlags : std::uint8_t {
  kGivesC = 1 << 0,
  kGivesBias = 1 << 1,
  kGivesPreActivation = 1 << 2,
  kGivesBiasGrad = 1 << 3,
  kGivesAmax = 1 << 4,
  kGivesBScale = 1 << 5,
  kIsFinished = 1 << 6,  // cuBLASMp stores D as it shall be
  kIsRefused = 1 << 7,   // in a second meeting: cuBLASMp has not enqueued the product
};

// The record of a rank that enters an operation. Everything but the places must be equal on all
// ranks. Of bulk and start_all_gather it describes the transfer alone, as the product is the
// rank's own: a_type, k = bytes of a row, fingerprint, rows_in.
struct Record {
  turn::Call call{};        // an xd_gemm_operation
  std::uint8_t algo = 0;    // an xd_gemm_algo, never AUTO
  std::uint8_t a_type = 0;  // a DType, as the other types
  std::uint8_t b_type = 0;
  std::uint8_t d_type = 0;
  std::uint8_t epilogue = 0;
  std::uint8_t flags = 0;
  std::uint32_t k = 0;
  std::uint32_t n = 0;
  std::uint64_t fingerprint = 0;  // of the tokens of all ranks; all_reduce: M
  std::uint16_t scaling = 0;      // a Scaling, and whether a has scales
  std::uint8_t mover = 0;         // a Mover, where the executor has several for an algorithm
  std::uint8_t given = 0;         // GivenFlags, of products by cuBLASMp
  std::uint32_t tag = 0;          // the caller's name for the product
  turn::PeerAddress rows_in{};    // rows that peers read, or into which they write
  turn::PeerAddress scales_in{};
  turn::PeerAddress more_in{};
};

// True if two ranks that are in the same operation also agree about its arguments. Host and device
// ask it.
constexpr bool same_operation(const Record& a, const Record& b) {
  return a.algo == b.algo && a.a_type == b.a_type && a.b_type == b.b_type && a.d_type == b.d_type &&
         a.epilogue == b.epilogue && a.flags == b.flags && a.k == b.k && a.n == b.n &&
         a.fingerprint == b.fingerprint && a.scaling == b.scaling && a.mover == b.mover &&
         a.given == b.given && a.tag == b.tag;
}

struct Family {
  using Record = gemm::Record;
  struct Facts {};
  using Status = xd_gemm_status;

  static constexpr Operations kOperations{"xd_gemm_", "an xd_gemm_operation", XD_GEMM_ALL_GATHER,
                                          kOperationNames};

  static constexpr bool same_operation(const Record& a, const Record& b) {
    return gemm::same_operation(a, b);
  }
  static std::string difference(const Record& mine, const Record& theirs);

  static constexpr Status no_error() { return XD_GEMM_STATUS_INIT; }
  static void tell(const turn::OperationError<Family>&, Status&) {}
  static void tell_caller(const turn::OperationError<Family>&, Status&) {}
};

using OperationError = turn::OperationError<Family>;

// The name of an algorithm without its prefix.
const char* algo_name(xd_gemm_algo algo);

}  // namespace xd::gemm
