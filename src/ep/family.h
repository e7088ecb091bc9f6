// The words of errors that groups of both kinds have in common.
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "ep/plan/config.h"
#include "ep/plan/quantise.h"
#include "turn/operation_error.h"

namespace xd::ep {

// How another rank's call differs from this rank's: "<what> <theirs>, here <mine>".
template <class Value>
std::string differs_in(const char* what, const Value& theirs, const Value& mine) {
  return concat(what, " ", theirs, ", here ", mine);
}
inline std::string type_differs(std::uint8_t theirs, std::uint8_t mine) {
  return differs_in("type", dtype_name(static_cast<DType>(theirs)),
                    dtype_name(static_cast<DType>(mine)));
}
inline std::string quantise_differs(xd_ep_quantise theirs, xd_ep_quantise mine) {
  return differs_in("quantise", quantise_name(theirs), quantise_name(mine));
}

inline std::string wire_differs(std::uint32_t theirs, std::uint32_t mine) {
  return differs_in("wire", wire_name(static_cast<xd_ep_wire>(theirs)),
                    wire_name(static_cast<xd_ep_wire>(mine)));
}

// Where tables of set_placement differ, of which ranks tell hashes alone.
inline constexpr const char* kOtherTable =
    "another placement (expert_of_slot, choice_first or choice_slots differ)";

std::string bad_ids_text(std::int64_t bad_ids, int lowest_rank, const CommonConfig& config);

template <class Family>
turn::OperationError<Family> bad_expert_ids(std::int64_t bad_ids, int lowest_rank,
                                            const CommonConfig& config) {
  return {.status = XD_ERROR_INVALID_ARGUMENT,
          .text = bad_ids_text(bad_ids, lowest_rank, config),
          .rank = lowest_rank,
          .facts = {.bad_ids = bad_ids},
          .met_by_all = true};
}

}  // namespace xd::ep
