// Helpers that the tests of bootstrap, mesh and net share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/tcp.h"
#include "meet/bootstrap.h"
#include "meet/unique_id.h"
#include "support/usage.h"
#include "unit/errors.h"

namespace xd::test {

// Collects standard error. Lines that are not the library's are passed on when the collecting ends,
// so that a sanitizer's report is not swallowed.
class LogCapture {
 public:
  LogCapture() { testing::internal::CaptureStderr(); }
  ~LogCapture() {
    if (!ended_) end();
  }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::vector<std::string> end() {
    ended_ = true;
    std::istringstream text(testing::internal::GetCapturedStderr());
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) {
      if (line.starts_with("crossdock: "))
        lines.push_back(line);
      else
        std::fprintf(stderr, "%s\n", line.c_str());
    }
    return lines;
  }

 private:
  bool ended_ = false;
};

// Runs body(rank) on one thread per rank; result[rank] is its error, if it threw one.
inline std::vector<std::optional<Error>> on_threads(int ranks,
                                                    const std::function<void(int)>& body) {
  std::vector<std::optional<Error>> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(r)] = error;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void expect_no_errors(const std::vector<std::optional<Error>>& errors) {
  for (std::size_t r = 0; r < errors.size(); ++r)
    EXPECT_FALSE(errors[r]) << "rank " << r << ": " << errors[r]->text();
}

inline bool eventually(const std::function<bool()>& condition, int within_ms = 10000) {
  const Deadline deadline = Deadline::after_ms(within_ms);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline int ms_since(std::chrono::steady_clock::time_point start) {
  return static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(
                              std::chrono::steady_clock::now() - start)
                              .count());
}

// A sanitizer may start a thread of its own beside the process's first one, so there has been one
// before the first count.
inline std::size_t running_threads() {
  static const bool had_one = (std::thread([] {}).join(), true);
  static_cast<void>(had_one);
  return live_threads();
}

inline Bytes bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return Bytes(bytes.begin(), bytes.end());
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The first of 16 ports that no process uses at the moment, below those that the system gives out
// by itself. Test programs that run side by side start from different ones.
inline int free_ports() {
  static int next = 12000 + 16 * (static_cast<int>(::getpid()) % 1000);
  const TcpAddress loopback = resolve("127.0.0.1", "address").front();
  for (bool all_free = false; !all_free; next += 16) {
    all_free = true;
    for (int port = next; port < next + 16; ++port)
      all_free = all_free && tcp_listen(loopback.with_port(static_cast<std::uint16_t>(port)));
  }
  return next - 16;
}

inline xd_unique_id new_id(int timeout_ms = 60000) {
  xd_unique_id_config config = XD_UNIQUE_ID_CONFIG_INIT;
  return create_unique_id(config, timeout_ms);
}

inline xd_comm_config id_config(const xd_unique_id& id, int rank, int num_ranks) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.unique_id = &id;
  config.rank = rank;
  config.num_ranks = num_ranks;
  return config;
}

// bootstrap.all_gather() with a blob that does not depend on this rank's address.
inline std::vector<Bytes> all_gather(Bootstrap& bootstrap, const Bytes& blob,
                                     const Deadline& deadline) {
  return bootstrap.all_gather([&](const TcpAddress*) { return blob; }, deadline);
}

// Meets the others with the blob "rank <r>" and returns the blobs of all.
inline std::vector<std::string> meet(const xd_comm_config& config, int timeout_ms = 20000) {
  const auto bootstrap = make_bootstrap(config);
  const Bytes blob = bytes_of("rank " + std::to_string(bootstrap->rank()));
  std::vector<std::string> texts;
  for (const Bytes& bytes : all_gather(*bootstrap, blob, Deadline::after_ms(timeout_ms)))
    texts.push_back(text_of(bytes));
  return texts;
}

inline void expect_all_came(const std::vector<std::string>& texts, int num_ranks) {
  ASSERT_EQ(texts.size(), static_cast<std::size_t>(num_ranks));
  for (int r = 0; r < num_ranks; ++r)
    EXPECT_EQ(texts[static_cast<std::size_t>(r)], "rank " + std::to_string(r));
}

// All ranks of a unique id meet.
inline void expect_meeting(const xd_unique_id& id, int num_ranks) {
  expect_no_errors(on_threads(num_ranks, [&](int rank) {
    expect_all_came(meet(id_config(id, rank, num_ranks)), num_ranks);
  }));
}

}  // namespace xd::test
