#include "comm/remote/links.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/remote/first_contact.h"
#include "comm/remote/network.h"

namespace xd {
namespace {

// Links that are polled while a rank waits.
class PolledLinks final : public Progress {
 public:
  explicit PolledLinks(net::Links& links) : links_(links) {}
  bool poll() override { return links_.poll(); }
  bool is_busy() override { return links_.sleep_on() < 0; }

 private:
  net::Links& links_;
};

std::vector<net::LinkNeighbour> name_neighbours(const Comm& comm, std::span<const int> ranks) {
  std::vector<net::LinkNeighbour> neighbours;
  for (const int rank : ranks)
    neighbours.push_back({rank, std::to_string(comm.hosts().host_of(rank))});
  return neighbours;
}

struct Kept {
  std::unique_ptr<net::Engine> engine;
  std::unique_ptr<net::Links> links;
};

// It never ends, so whoever looks for leaks finds what is in it.
std::vector<Kept>& all_kept() {
  static auto& all = *new std::vector<Kept>;
  return all;
}

}  // namespace

RemoteLinks::RemoteLinks(Comm& comm, CollectiveCall call, Config config,
                         std::unique_ptr<net::Engine> engine)
    : neighbours_(std::move(config.neighbours)),
      engine_(engine ? std::move(engine) : network().open_together(comm, call)) {
  const net::LinkConfig links{.rank = comm.rank(),
                              .frames = config.frames,
                              .frame_bytes = config.frame_bytes,
                              .memory = config.memory};
  comm.collective().agree(call, [&] {
    links_ = std::make_unique<net::Links>(*engine_, links, name_neighbours(comm, neighbours_));
    return Collective::Contribution{};
  });
  connect(comm, call);
}

void RemoteLinks::keep_for_good() noexcept {
  static std::mutex mutex;
  try {
    const std::scoped_lock lock(mutex);
    Kept& kept = all_kept().emplace_back();
    kept = {std::move(engine_), std::move(links_)};
  } catch (...) {
    leave_behind();
  }
}

// Every rank gives all ranks its offers, each with the rank that it is for.
void RemoteLinks::connect(Comm& comm, CollectiveCall call) {
  const auto items = comm.collective().agree(call, [&] {
    WireWriter writer;
    for (std::size_t p = 0; p < neighbours_.size(); ++p) {
      const Bytes offer = links_->offer(static_cast<int>(p));
      writer.put(static_cast<std::int32_t>(neighbours_[p]));
      writer.put(static_cast<std::uint32_t>(offer.size()));
      writer.put_bytes(offer);
    }
    Bytes offers = writer.take();
    if (offers.size() + 256 > Mesh::kMaxBlob) {
      fail(XD_ERROR_UNSUPPORTED, "the addresses for ", neighbours_.size(), " neighbours on other ",
           "machines have ", offers.size(), " bytes, expected at most ", Mesh::kMaxBlob - 256,
           ": there are too many machines");
    }
    return Collective::Contribution{.blob = std::move(offers)};
  });
  comm.collective().agree(call, [&] {
    for (std::size_t p = 0; p < neighbours_.size(); ++p) {
      WireReader reader(items[at(neighbours_[p])].blob);
      for (;;) {
        const auto to = reader.take<std::int32_t>();
        const auto bytes = reader.take_bytes(reader.take<std::uint32_t>());
        if (!reader.ok())
          fail(XD_ERROR_MISMATCH, "rank ", neighbours_[p], " offers no link to rank ", comm.rank());
        if (to != comm.rank()) continue;
        links_->accept(static_cast<int>(p), bytes);
        break;
      }
    }
    return Collective::Contribution{};
  });
  comm.collective().agree(call, [&] {
    greet(comm);
    engine_->shut();
    return Collective::Contribution{};
  });
}

// Makes the engine's connections.
void RemoteLinks::greet(Comm& comm) {
  const FirstContact contact(comm);
  int silent = 0;
  try {
    links_->greet();
    PolledLinks polled(*links_);
    const auto all_here = [&] { return links_->all_connected(); };
    if (contact.wait(polled, all_here) != Waited::late) return;
    silent = std::max(links_->first_ungreeted(), 0);
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_SYSTEM || error.peer() < 0) throw;
    if (contact.is_lost(error.peer())) return;
    const auto place = std::ranges::find(neighbours_, error.peer()) - neighbours_.begin();
    contact.fail_data(error.status(), error.peer(), links_->place_of(static_cast<int>(place)),
                      error.text());
  }
  contact.fail_silent(neighbours_[at(silent)], links_->place_of(silent));
}

// An engine may notice first that a neighbour has ended. Then the watch names it with its process
// or host, for all ranks alike, and that is what ends the operation here.
void RemoteLinks::give_up(Comm& comm, const HostWait& site, const Error& error) {
  comm.errors().throw_if_failed();
  const int peer = error.peer() >= 0 ? error.peer() : comm.rank();
  if (error.status() == XD_ERROR_SYSTEM && comm.is_lost_by_verdict(peer, site))
    comm.throw_lost(peer, site);
  const Cause cause = cause_of(error, comm.rank());
  comm.errors().raise_cause({.status = error.status(),
                             .phase = site.phase,
                             .rank = comm.rank(),
                             .peer = peer,
                             .group = site.group,
                             .operation = site.operation,
                             .expected_epoch = site.epoch},
                            cause);
  comm.errors().throw_if_failed();
  throw Error(error);
}

}  // namespace xd
