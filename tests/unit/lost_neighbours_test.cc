// Links whose neighbours may be lost while the others go on.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "net/engines/in_process.h"
#include "unit/link_support.h"

namespace xd::test {
namespace {

using net::Links;

// Until done() says so, while both poll.
template <class Done>
void drive(Links& links, Links& peer, Done&& done) {
  links.wait_for(Deadline::after_ms(kGenerousMs), -1, "the test", [&] {
    peer.poll();
    return done();
  });
}

TEST(LostNeighbours, AreNoFailureOfLinksThatOutliveThem) {
  constexpr int kGone = 1, kHere = 0;  // neighbours of rank 0: ranks 2 and 1
  Fleet fleet(net::make_in_process_engines(3), config_of(2, 64));
  fleet.links[2].reset();
  fleet.engines[2].reset();
  Links& links = *fleet.links[0];
  links.outlive_neighbours();
  const auto under_way = links.take(kGone), unsent = links.take(kGone);
  links.send(*under_way, 1);
  Links& peer = *fleet.links[1];
  drive(links, peer, [&] { return links.is_lost(kGone); });
  EXPECT_FALSE(links.is_lost(kHere));
  EXPECT_FALSE(links.holds_back(kGone));
  EXPECT_EQ(links.first_unread(), -1);
  // The engine may yet read the frame that was under way; what is sent now goes nowhere.
  const std::uint64_t puts = links.sent().puts;
  links.send(*unsent, 1);
  EXPECT_FALSE(links.is_free(kGone, under_way->frame));
  EXPECT_TRUE(links.is_free(kGone, unsent->frame));
  EXPECT_FALSE(links.at_rest());
  EXPECT_EQ(links.sent().puts, puts);
  for (int use = 0; use < 3; ++use) {
    const auto frame = links.take(kHere);
    ASSERT_TRUE(frame);
    links.send(*frame, 1);
    std::optional<Links::Chunk> chunk;
    drive(links, peer, [&] { return (chunk = peer.next(0)).has_value(); });
    EXPECT_EQ(chunk->bytes.size(), 1u);
    peer.give_back(*chunk);
    drive(links, peer, [&] { return links.is_free(kHere, frame->frame); });
  }
}

}  // namespace
}  // namespace xd::test
