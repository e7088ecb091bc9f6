#include "ranks.h"

#include <cstring>

#include "each.h"

namespace xdjax {
namespace {

std::optional<Problem> join(const RankInfo& rank_info, DLDevice device, int timeout_ms,
                            xd_comm** comm) {
  xd_unique_id id;
  if (rank_info.unique_id.size() != sizeof(id.bytes)) {
    return invalid("unique_id: expected " + std::to_string(sizeof(id.bytes)) + " bytes, got " +
                   std::to_string(rank_info.unique_id.size()));
  }
  std::memcpy(id.bytes, rank_info.unique_id.data(), sizeof(id.bytes));
  xd_comm_config config XD_COMM_CONFIG_INIT;
  config.rank = rank_info.rank;
  config.num_ranks = rank_info.num_ranks;
  config.unique_id = &id;
  config.device = device;
  config.timeout_ms = timeout_ms;
  config.name = rank_info.name.c_str();
  if (!rank_info.global_ranks.empty()) config.global_ranks = rank_info.global_ranks.data();
  return problem_of(xd_comm_create(&config, comm));
}

}  // namespace

Ranks::Ranks(DLDeviceType device_type, const std::vector<RankInfo>& rank_infos, int timeout_ms) {
  for (const RankInfo& rank_info : rank_infos) {
    ranks_.push_back({rank_info.ordinal, rank_info.rank, {device_type, rank_info.device}, nullptr});
  }
  const std::optional<Problem> problem = for_each_rank(rank_infos.size(), [&](std::size_t i) {
    return join(rank_infos[i], ranks_[i].device, timeout_ms, &ranks_[i].comm);
  });
  if (problem) {
    leave();
    throw Problem(*problem);
  }
}

Ranks::~Ranks() { leave(); }

std::optional<Problem> Ranks::register_memory(const std::vector<std::uintptr_t>& pointers,
                                              const std::vector<std::size_t>& bytes) {
  return for_each_rank(ranks_.size(), [&](std::size_t i) {
    auto* const start = reinterpret_cast<void*>(pointers[i]);  // NOLINT(performance-no-int-to-ptr)
    std::int32_t registration = 0;
    return problem_of(xd_mem_register(ranks_[i].comm, start, bytes[i], &registration));
  });
}

void Ranks::leave() {
  for (Rank& rank : ranks_) {
    xd_comm_destroy(rank.comm);
    rank.comm = nullptr;
  }
}

}  // namespace xdjax
