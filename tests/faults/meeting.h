// Ranks of fault tests that meet by a unique id.
#pragma once

#include "support/handles.h"

namespace xd::test {

// A new meeting point, which ends by itself after this time; 0 = as the library wants.
inline xd_unique_id new_id(int timeout_ms = 0) {
  xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
  config.timeout_ms = timeout_ms;
  xd_unique_id id;
  ok(xd_unique_id_create(&config, &id));
  return id;
}

// The config of a rank that meets the others there; `id` stays where it is.
inline xd_comm_config id_config(const xd_unique_id& id, int rank, int num_ranks,
                                int timeout_ms = 0) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.unique_id = &id;
  config.rank = rank;
  config.num_ranks = num_ranks;
  config.timeout_ms = timeout_ms;
  return config;
}

}  // namespace xd::test
