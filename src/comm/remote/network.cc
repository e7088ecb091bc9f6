#include "comm/remote/network.h"

#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/wire.h"
#include "comm/comm.h"
#include "net/fabric/fabric.h"
#include "net/link_tag.h"

namespace xd {
namespace {

std::vector<std::string> lines_of(const Bytes& bytes) {
  std::vector<std::string> lines;
  std::string line;
  for (const std::byte byte : bytes) {
    if (byte != std::byte{'\n'}) {
      line.push_back(static_cast<char>(byte));
    } else {
      lines.push_back(std::exchange(line, {}));
    }
  }
  return lines;
}

}  // namespace

std::uint32_t Network::part_of_host(std::string_view) const { return 0; }

Network::Frames Network::usual_frames() const {
  return {.bytes = std::size_t{256} << 10, .most = net::kMaxLinkFrames / 2};
}

std::unique_ptr<net::Engine> Network::open_together(Comm& comm, CollectiveCall call) const {
  std::shared_ptr<const net::FabricLibrary> library;
  const std::string address = comm.address();
  const auto items = comm.collective().agree(call, [&] {
    library = net::load_fabric();
    Collective::Contribution mine;
    for (const std::string& provider : net::fabric_providers(*library, address)) {
      const auto bytes = std::as_bytes(std::span(provider));
      mine.blob.insert(mine.blob.end(), bytes.begin(), bytes.end());
      mine.blob.push_back(std::byte{'\n'});
    }
    return mine;
  });
  std::vector<std::vector<std::string>> of_ranks;
  for (const auto& item : items) of_ranks.push_back(lines_of(item.blob));
  const std::string provider = net::agree_on_provider(of_ranks);
  std::unique_ptr<net::Engine> engine;
  comm.collective().agree(call, [&] {
    engine = net::open_fabric(library, provider, address);
    return Collective::Contribution{};
  });
  log_topic("comm", "rank ", comm.rank(), " reaches other machines by libfabric ",
            net::fabric_version(*library), ", ", provider, ", from ", address);
  return engine;
}

}  // namespace xd
