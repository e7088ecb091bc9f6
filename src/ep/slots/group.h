// A group of low latency, as every executor has it.
#pragma once

#include <crossdock/low_latency.h>

#include <memory>

#include "ep/group.h"
#include "ep/slots/calls.h"
#include "ep/slots/family.h"
#include "ep/slots/plan.h"

namespace xd::ep {

class LlGroup : public GroupOf<LlFamily, LlConfig> {
 public:
  virtual void dispatch(const xd_ll_dispatch_args* args, xd_stream stream) = 0;
  virtual void combine(const xd_ll_combine_args* args, xd_stream stream) = 0;
  virtual void mask_set(std::int32_t rank, std::int32_t masked, xd_stream stream) = 0;
  virtual void mask_get(const DLTensor* mask, xd_stream stream) = 0;
  virtual void reset(xd_stream stream) = 0;
  // The count of watch() as a word of the device.
  virtual const std::uint64_t* fault_word() const = 0;

  // Takes this rank's turn with a failure, as Sequence does, in dispatch or combine.
  void join_failed_operation(std::int32_t operation, const char* text, xd_stream stream);

  PlanTerms plan_terms() const { return terms_of(config(), rank(), hosts().fingerprint()); }

 protected:
  // Collective: validates this rank's config, and checks that the ranks agree. Throws
  // INVALID_ARGUMENT where the config is bad and MISMATCH elsewhere; UNSUPPORTED where ranks are on
  // several machines and the group masks.
  LlGroup(std::shared_ptr<Comm> comm, const xd_ll_config* config);

  // Throws INVALID_ARGUMENT unless the group may leave ranks out.
  void require_masks() const;
  // The sizes on which the ranks have agreed, for one that takes the group over.
  const Bytes& terms() const { return terms_; }

 private:
  Bytes terms_;
};

}  // namespace xd::ep
