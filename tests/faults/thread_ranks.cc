#include "faults/thread_ranks.h"

#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "faults/meeting.h"
#include "faults/rank_program.h"

namespace xd::test {

void on_thread_ranks(int num_ranks, int timeout_ms, const std::function<void(Rank&, Comm&)>& body) {
  const xd_unique_id id = new_id();
  const auto run = [&](int number) {
    std::unique_ptr<Memory> memory;
    try {
      memory = make_memory(executor(), number);
      xd_comm_config config = id_config(id, number, num_ranks, timeout_ms);
      config.device = memory->device();
      config.heap_bytes = std::size_t{1} << 20;
      Comm comm = make_comm(config);
      Rank rank{number, num_ranks, true, comm.get(), memory.get(), "", {}};
      try {
        body(rank, comm);
      } catch (...) {
        if (rank.asynchronous() && comm) {  // destroying is for when nothing runs any more
          xd_comm_abort(comm.get());
          memory->synchronize();
        }
        throw;
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << number << ": " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < num_ranks; ++number) threads.emplace_back(run, number);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace xd::test
