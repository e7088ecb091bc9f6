#include "ep/executors.h"
#include "ep/experts/cpu/experts.h"

namespace xd::ep::cpu {

const ExpertsExecutor kExperts{
    .device_type = kDLCPU,
    .gated = [](const GatedCall& call, const DLDevice&, xd_stream) { compute_gated(call); },
    .grouped_product = [](const GroupedProductCall& call, const DLDevice&,
                          xd_stream) { compute_grouped_product(call); },
    .grouped_outer = [](const GroupedOuterCall& call, const DLDevice&,
                        xd_stream) { compute_grouped_outer(call); },
    .check_product = [](const GroupedProductCall&, const DLDevice&) {},
    .check_outer = [](const GroupedOuterCall&, const DLDevice&) {}};

}  // namespace xd::ep::cpu
