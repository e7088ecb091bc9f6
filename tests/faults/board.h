// A board on which ranks of a fault test tell one another things without the library's calls: a few
// words in the symmetric memory of a communicator that the test leaves alone. Meeting there
// allocates nothing and sends nothing.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "faults/meeting.h"
#include "support/world.h"

namespace xd::test {

class Board {
 public:
  explicit Board(const Rank& rank)
      : rank_(rank.rank),
        ranks_(static_cast<std::uint32_t>(rank.num_ranks)),
        comm_(rank.another_comm("board", sizeof(Words))) {
    // The first allocation has the same offset on every rank.
    void* mine = nullptr;
    ok(xd_mem_alloc(comm_.get(), sizeof(Words), &mine));
    xd_mem_handle first{};
    ok(xd_mem_export(comm_.get(), mine, &first));
    first.rank = 0;
    void* words = nullptr;
    ok(xd_mem_import(comm_.get(), &first, &words));
    words_ = static_cast<Words*>(words);  // zero
    ok(xd_comm_barrier(comm_.get()));
  }

  // Returns when all ranks have called it.
  void meet() {
    const std::uint32_t turn = words_->turn.load();
    if (words_->arrived.fetch_add(1) + 1 == ranks_) {
      words_->arrived = 0;
      words_->turn = turn + 1;
      return;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (words_->turn.load() == turn) {
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("a rank did not come");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // result[r] = the value of rank r.
  std::vector<std::int64_t> share(std::int64_t value) {
    words_->values[static_cast<std::size_t>(rank_)] = value;
    meet();
    std::vector<std::int64_t> all(words_->values.begin(), words_->values.begin() + ranks_);
    meet();
    return all;
  }

  // A new meeting point, made by rank 0.
  xd_unique_id new_id() {
    constexpr int kTimeoutMs = 1000;  // end of a meeting to which not all come
    if (rank_ == 0) words_->id = test::new_id(kTimeoutMs);
    meet();
    const xd_unique_id id = words_->id;
    meet();
    return id;
  }

 private:
  struct Words {
    std::atomic<std::uint32_t> arrived, turn;
    std::array<std::atomic<std::int64_t>, 16> values;
    xd_unique_id id;
  };

  int rank_;
  std::uint32_t ranks_;
  Comm comm_;
  Words* words_ = nullptr;
};

// The end of a call, kept without allocating.
struct Ended {
  xd_status status = XD_SUCCESS;
  std::chrono::milliseconds after{};
  std::array<char, 600> text{};

  bool mentions(const char* part) const {
    return std::string_view(text.data()).find(part) != std::string_view::npos;
  }
};

template <class Call>
Ended timed(Call&& call) {
  Ended ended;
  const auto start = std::chrono::steady_clock::now();
  ended.status = call();
  ended.after = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  if (ended.status != XD_SUCCESS)
    std::strncpy(ended.text.data(), xd_last_error(), ended.text.size() - 1);
  return ended;
}

inline std::ostream& operator<<(std::ostream& out, const Ended& ended) {
  return out << xd_status_name(ended.status) << " after " << ended.after.count()
             << " ms: " << ended.text.data();
}

}  // namespace xd::test
