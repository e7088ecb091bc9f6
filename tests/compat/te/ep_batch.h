// The operations of a Batch by TransformerEngine's functions, to be held against the library's own.
#pragma once

#include <crossdock/compat/te_ep.h>

#include "compat/te/tensors.h"
#include "conformance/batch.h"

namespace xd::test {

// The group behind TransformerEngine's functions, until the end of the scope.
struct TeGroup {
  TeGroup(void* comm, const NVTEEpGroupConfig& config) { nvte_ep_initialize(comm, &config); }
  ~TeGroup() { nvte_ep_shutdown(); }
  TeGroup(const TeGroup&) = delete;
  TeGroup& operator=(const TeGroup&) = delete;
};

// A batch without what TransformerEngine's functions do not have: weights in combine, counts
// without padding, offsets and rows per rank.
class TeBatch {
 public:
  TeBatch(const Rank& rank, const Case& c, Place place = Place::ordinary);

  // Takes the plan's bytes from the group of this process. `alignment` and top-k are the batch's.
  void use_group();
  NVTEEpLayerConfig layer() const { return layer_; }
  transformer_engine::TensorWrapper handle() const;

  // By the functions of TransformerEngine's names; they return when the operation has ended.
  void prepare();
  void dispatch();
  void prepare_and_dispatch();
  void combine();
  void dispatch_bwd();
  void combine_bwd();
  void run_all();

  // By the library's own calls, in a group of its own. Collective.
  void run_all_directly(xd_comm* comm, const xd_ep_config& config);

  // All tensors must have the same bytes, guard zones included, as those of a batch of the same
  // case.
  void expect_equal(TeBatch& direct);

  Batch& batch() { return batch_; }
  // Tensors of rows come with a window, and their own addresses are wrong.
  bool by_windows = false;

 private:
  struct Payload;

  const Rank& rank_;
  Batch batch_;
  Buffer handle_;
  NVTEEpLayerConfig layer_ = NVTE_EP_LAYER_CONFIG_INIT;
};

// The config of the group in which TransformerEngine's functions do what a group with this config
// does. The capacity is set, also where `config` leaves it to the library.
NVTEEpGroupConfig te_config(const xd_ep_config& config);

}  // namespace xd::test
