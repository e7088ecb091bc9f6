#include "ranks.h"

#include <cstring>

#include "each.h"

namespace xdjax {
namespace {

std::optional<Problem> join(const Seat& seat, DLDevice device, int timeout_ms, xd_comm** comm) {
  xd_unique_id id;
  if (seat.unique_id.size() != sizeof(id.bytes)) {
    return invalid("unique_id: expected " + std::to_string(sizeof(id.bytes)) + " bytes, got " +
                   std::to_string(seat.unique_id.size()));
  }
  std::memcpy(id.bytes, seat.unique_id.data(), sizeof(id.bytes));
  xd_comm_config config XD_COMM_CONFIG_INIT;
  config.rank = seat.rank;
  config.num_ranks = seat.num_ranks;
  config.unique_id = &id;
  config.device = device;
  config.timeout_ms = timeout_ms;
  config.name = seat.name.c_str();
  if (!seat.global_ranks.empty()) config.global_ranks = seat.global_ranks.data();
  return problem_of(xd_comm_create(&config, comm));
}

}  // namespace

Ranks::Ranks(DLDeviceType device_type, const std::vector<Seat>& seats, int timeout_ms) {
  for (const Seat& seat : seats) {
    ranks_.push_back({seat.ordinal, seat.rank, {device_type, seat.device}, nullptr});
  }
  const std::optional<Problem> problem = for_each_rank(seats.size(), [&](std::size_t i) {
    return join(seats[i], ranks_[i].device, timeout_ms, &ranks_[i].comm);
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
