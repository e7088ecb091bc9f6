// Strangers at the ports over which rows and channels' bytes come (stranger.c). Those who have come
// in before such a port was shut are the subject of unit tests of libfabric's engine.
#include <gtest/gtest.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include "net/job.h"
#include "support/stranger.h"

namespace xd::test {
namespace {

using NetStranger = Net;

std::size_t resident_bytes(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// Neither from another machine nor from the rank's own, to the port of channels or that of a group.
TEST_F(NetStranger, NobodyReachesADataPortOnceAllPeersHave) {
  NetHosts hosts(3);
  CommJob job(hosts, {0, 1});
  job.all_fine("channels");
  job.all_fine("swap -1 3");
  job.tell("steps 1000000");
  std::vector<int> ports;
  for (int tries = 0; ports.size() < 2 && tries < 2000; ++tries) {
    sleep_ms(10);
    ports = listening_ports(job.rank(0).pid(), 0);
  }
  ASSERT_EQ(ports.size(), 2U);
  sleep_ms(1000);  // the group is made
  const std::size_t before = resident_bytes(job.rank(0).pid());
  for (const int port : ports) {
    for (const int from : {2, 0}) {
      for (const char* const mode : {"tags", "messages"}) {
        SCOPED_TRACE(mode + (" from host " + std::to_string(from)));
        const std::string there = "ip netns exec " + hosts.name(from) + " ";
        EXPECT_EQ(stranger_says(there, hosts.address(from, Family::ipv4),
                                hosts.address(0, Family::ipv4), port, mode),
                  "0 taken");
      }
    }
  }
  EXPECT_LT(resident_bytes(job.rank(0).pid()), before + (std::size_t{16} << 20));
  // The steps go on, with right rows, until somebody is lost.
  job.rank(1).kill();
  expect_words(job.rank(0).answer(), {"XD_ERROR_PEER_LOST", "rank 1 of host 1 ("});
}

}  // namespace
}  // namespace xd::test
