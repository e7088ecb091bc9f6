#include "ep/executors.h"
#include "ep/experts/cuda/experts.h"

namespace xd::ep::cuda {

void load_experts() {
  load_gated();
  load_grouped();
}

const ExpertsExecutor kExperts{.device_type = kDLCUDA,
                               .gated = start_gated,
                               .grouped_product = start_grouped_product,
                               .grouped_outer = start_grouped_outer,
                               .check_product = check_grouped_product,
                               .check_outer = check_grouped_outer};

}  // namespace xd::ep::cuda
