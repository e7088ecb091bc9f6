// Hosts of a test: network namespaces of this machine, joined by a bridge. Making them needs root
// and the programs ip and nft.
#pragma once

#include <string>

namespace xd::test {

enum class Family { ipv4, ipv6 };

class NetHosts {
 public:
  // The reason why this process can make none; empty if it can.
  static std::string why_not();

  // Removes also what tests that were killed have left behind. Throws std::runtime_error.
  explicit NetHosts(int count);
  ~NetHosts();
  NetHosts(const NetHosts&) = delete;
  NetHosts& operator=(const NetHosts&) = delete;

  int count() const { return count_; }
  std::string name(int host) const;  // of its namespace
  std::string address(int host, Family family) const;

  // ---- Changes of the network ----

  void set_link(int host, bool up);
  // From now on the host loses what comes in, what goes out, or both.
  enum class Way { in, out, both };
  void drop(int host, Way way);
  void lose(int host, int percent);  // of what comes in and goes out
  // A firewall that drops new connections to other ports than these, or in the words of nft does
  // something else to them.
  void admit_ports(int host, int first, int last, const std::string& otherwise = "drop");
  // A firewall that refuses all that comes in, in these words of nft.
  void refuse(int host, const std::string& with);
  // Packets that the host sends to other ports than these come from another address than the
  // host's.
  void translate(int host, int first, int last);
  void set_mtu(int host, int bytes);      // at both ends of its link
  void drop_longer(int host, int bytes);  // packets that come in and go out, without a word
  void throttle(int host, int megabits);  // of outgoing bytes, per second
  // A second interface, with an address that leads nowhere.
  void add_dead_interface(int host);

 private:
  std::string prefix_;
  int count_;
};

}  // namespace xd::test
