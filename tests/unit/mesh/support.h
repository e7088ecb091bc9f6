// Meshes of threads and of processes, for tests.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "meet/connector.h"
#include "meet/introduction.h"
#include "meet/mesh.h"
#include "meet/met_ranks.h"
#include "meet/several_hosts.h"
#include "unit/net_support.h"

namespace xd::test {

// Writes down the watch thread's reports, in order: "lost 1 2", "silent 1 2", "left 3", "abort 0".
class Diary final : public MeshEvents {
 public:
  void on_lost(const Loss& loss) override {
    std::string text = loss.silence_ms == 0 ? "lost" : "silent";
    for (const int rank : loss.ranks) text += " " + std::to_string(rank);
    add(text);
  }
  void on_left(int rank) override { add("left " + std::to_string(rank)); }
  void on_abort(int rank) override { add("abort " + std::to_string(rank)); }
  void on_report(int rank, std::span<const std::byte> report) override {
    add("report of " + std::to_string(rank) + ": " + text_of(report));
  }
  void on_end(xd_status status, int) noexcept override {
    add(std::string("end ") + status_name(status));
  }

  std::vector<std::string> entries() const {
    const std::lock_guard lock(mutex_);
    return entries_;
  }
  bool has(const std::string& entry) const {
    const auto all = entries();
    return std::find(all.begin(), all.end(), entry) != all.end();
  }

 private:
  void add(const std::string& entry) {
    const std::lock_guard lock(mutex_);
    entries_.push_back(entry);
  }
  mutable std::mutex mutex_;
  std::vector<std::string> entries_;
};

// One rank: its diary outlives its mesh.
class Member {
 public:
  Diary diary;
  std::unique_ptr<Mesh> mesh;

  void connect(const xd_unique_id& id, int rank, int num_ranks, int timeout_ms = 20000,
               const MeshOptions& options = {}) {
    rank_ = rank;
    num_ranks_ = num_ranks;
    const auto bootstrap = make_bootstrap(id_config(id, rank, num_ranks));
    mesh = Mesh::connect(*bootstrap, Deadline::after_ms(timeout_ms), options);
  }
  void join(const xd_unique_id& id, int rank, int num_ranks, const MeshOptions& options = {}) {
    connect(id, rank, num_ranks, 20000, options);
    mesh->start(diary);
  }
  std::vector<Mesh::Item> gather(const std::string& text, int fd = -1, int timeout_ms = 20000) {
    const Bytes blob = bytes_of(text);
    const auto ranks = static_cast<std::size_t>(num_ranks_);
    std::vector<Mesh::Item> items(ranks);
    mesh->all_gather(blob, fd, Deadline::after_ms(timeout_ms), items);
    items[static_cast<std::size_t>(rank_)].blob = blob;
    return items;
  }

 private:
  int rank_ = 0, num_ranks_ = 0;
};

// All ranks of a communicator as threads of this process, started.
inline std::vector<Member> threads_mesh(int num_ranks) {
  std::vector<Member> members(static_cast<std::size_t>(num_ranks));
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(num_ranks, [&](int rank) {
    members[static_cast<std::size_t>(rank)].join(id, rank, num_ranks);
  }));
  return members;
}

// A rank that follows the protocol as far as the test likes. It belongs outside of on_threads()
// where the others must succeed: its end is a loss for those that are still connecting.
struct OddRank {
  // With a secret of the job it is alone on its host, and is called over TCP on the loopback
  // interface.
  OddRank(const xd_unique_id& id, int own_rank, int num_ranks, const std::string& secret = {})
      : rank(own_rank), job_secret(secret), own(make_introduction(num_ranks, {}, secret)) {
    listeners.near = listen_for_links(own.socket_name, num_ranks);
    if (!job_secret.empty()) {
      own.host.part = static_cast<std::uint32_t>(rank);
      listeners.remote = tcp_listen(numeric_address("127.0.0.1").value().with_port(0));
      introduce_address(own, local_address(listeners.remote.get()));
    }
    bootstrap = make_bootstrap(id_config(id, rank, num_ranks));
  }
  void introduce() {
    std::vector<Introduction> all;
    for (const Bytes& blob : all_gather(*bootstrap, encode(own), Deadline::after_ms(20000)))
      all.push_back(decode_introduction(blob).value());
    ranks = std::make_unique<MetRanks>(MetRanks::of(rank, all, job_secret));
  }
  void connect() {
    MeshConnector connector(*ranks, std::move(listeners), {}, job_secret.empty() ? 0 : 3000);
    links = connector.run(Deadline::after_ms(20000));
  }

  int rank;
  std::string job_secret;
  Introduction own;
  MeshListeners listeners;
  std::unique_ptr<Bootstrap> bootstrap;
  std::unique_ptr<MetRanks> ranks;
  std::vector<MeshLink> links;
};

}  // namespace xd::test
