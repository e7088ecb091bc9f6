// The operations of crossdock/gemm.h on buffers that have their names.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "operands.h"

namespace xdjax {

// The family of products that are spread over the ranks, which runs on contexts.
struct Products {
  using Handle = xd_gemm_context;
  using Config = xdpy::Given<xd_gemm_config>;
  using Operation = xd_gemm_operation;
  static constexpr const char* word = "context";
  static constexpr const char* init = "crossdock.jax.tp.init";

  // The arguments of a call beside buffers, by the names of xd_gemm_args.
  struct Numbers {
    bool transpose_a = false;
    bool transpose_b = false;
    bool allow_tf32 = false;
    xd_gemm_epilogue epilogue = XD_GEMM_EPILOGUE_NONE;
    xd_gemm_algo algo = XD_GEMM_ALGO_AUTO;
    xd_gemm_operation collective = XD_GEMM_ALL_GATHER;  // bulk's transfer beside its product
    std::uint32_t tag = 0;
    // By rank, where they differ: its rows of the buffers whose rows are a rank's tokens, all of
    // which have as many rows as the rank with the most. Of the others nothing is read or written.
    std::vector<std::int64_t> tokens;
  };

  static xd_status create(xd_comm* comm, const Config& config, Handle** context) {
    return xd_gemm_context_create(comm, config.get(), context);
  }
  static xd_status destroy(Handle* context) { return xd_gemm_context_destroy(context); }

  // Every operation may be recorded in a command buffer.
  static bool replayable(Operation /*operation*/) { return true; }

  // Runs `operation`, which on CUDA means that it is enqueued on `stream`. Tensors that `operands`
  // lacks are absent in the call.
  static xd_status run(Operation operation, const Numbers& numbers, Handle* context,
                       const Operands& operands, xd_stream stream);

  // Fails the operation on all ranks.
  static std::optional<xd_status> fail(Operation operation, const Numbers& /*numbers*/,
                                       Handle* context, const char* text, xd_stream stream) {
    return xd_gemm_join_failed(context, operation, text, stream);
  }
};

}  // namespace xdjax
