#include "ep/family.h"

namespace xd::ep {

std::string bad_ids_text(std::int64_t bad_ids, int lowest_rank, const CommonConfig& config) {
  return concat("topk_idx: ", bad_ids, " expert ids over all ranks (the lowest rank with some is ",
                lowest_rank, ") are out of range", config.collapse ? "" : " or repeated in a row",
                ", expected -1 or 0 to ", config.num_ids() - 1,
                config.collapse ? "" : " and each expert once",
                "; they count as -1 and the plan is usable");
}

}  // namespace xd::ep
