// A context, as every executor has it: a sequence of operations whose bounds all ranks have agreed
// on. An executor derives from it and carries the operations out.
#pragma once

#include <crossdock/gemm.h>

#include <memory>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "comm/hosts.h"
#include "gemm/calls.h"
#include "gemm/config.h"
#include "gemm/family.h"
#include "turn/sequence.h"

namespace xd::gemm {

class Context : public turn::Sequence<Family> {
 public:
  // all_gather, reduce_scatter or all_reduce.
  virtual void product(xd_gemm_operation operation, const xd_gemm_args* args, xd_stream stream) = 0;
  virtual void bulk(const xd_gemm_bulk_args* args, xd_stream stream) = 0;
  virtual void start_all_gather(const xd_gemm_gather_args* args, xd_stream stream) = 0;
  virtual void wait(xd_stream stream) = 0;
  // Throws INVALID_ARGUMENT where nothing is kept.
  virtual xd_gemm_view gathered() = 0;

  // Says what a call would do. Local.
  xd_gemm_plan_info explain(std::int32_t operation, const xd_gemm_args* args) const;

  const Config& config() const { return config_; }
  // The ranks whose memory this rank reads and writes in operations, itself included.
  const NearRanks& near() const { return comm().hosts().near(); }
  NearRank self() const { return comm().hosts().self(); }
  // `starts`: where the shares of the call are kept.
  CallContext call_context(std::span<std::int64_t> starts) const {
    return {&config_, comm().device(), rank(), starts};
  }

 protected:
  // Collective: validates this rank's config, and checks that the ranks agree. Throws
  // INVALID_ARGUMENT where the config is bad and MISMATCH elsewhere.
  Context(std::shared_ptr<Comm> comm, const xd_gemm_config* config);

  // Throws UNSUPPORTED where the call's algorithm cannot run.
  virtual xd_gemm_plan_info plan_of(const ProductCall& call) const = 0;

 private:
  Config config_;
};

}  // namespace xd::gemm
