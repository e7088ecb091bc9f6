#include "net/net_hosts.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <sstream>
#include <stdexcept>

namespace xd::test {
namespace {

constexpr const char* kNamespaces = "/run/netns";

void run(const std::string& script) {
  if (std::system(("set -e\n" + script).c_str()) != 0)
    throw std::runtime_error("failed: " + script);
}

bool succeeds(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

// The process that has made a namespace of these tests; 0 if they have not made it.
pid_t maker_of(const std::string& name) {
  static const std::regex ours("xd([0-9]+)h([0-9]+|probe)");
  std::smatch parts;
  return std::regex_match(name, parts, ours) ? static_cast<pid_t>(std::stol(parts[1])) : 0;
}

void remove_leftovers() {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(kNamespaces, none)) {
    const std::string name = entry.path().filename();
    const pid_t maker = maker_of(name);
    if (maker > 0 && ::kill(maker, 0) != 0) succeeds("ip netns del " + name);
  }
}

std::string addresses(int host) {
  const std::string number = std::to_string(host + 1);
  return "addr add 10.97.0." + number + "/24 dev eth0\naddr add fd97::" + number +
         "/64 dev eth0 nodad\n";
}

}  // namespace

std::string NetHosts::why_not() {
  if (::geteuid() != 0) return "network namespaces are made by root";
  if (!succeeds("ip -V") || !succeeds("nft -v")) return "the programs ip and nft are not there";
  const std::string probe = "xd" + std::to_string(::getpid()) + "hprobe";
  if (!succeeds("ip netns add " + probe)) return "ip netns add is refused here";
  const bool has_links = succeeds("ip -n " + probe + " link add bridge type bridge") &&
                         succeeds("ip -n " + probe + " link add eth0 type veth peer name port0");
  const bool has_rules = succeeds("ip netns exec " + probe + " nft add table inet xd");
  succeeds("ip netns del " + probe);
  if (!has_links) return "the kernel has no bridge or no veth";
  return has_rules ? "" : "the kernel has no nf_tables";
}

NetHosts::NetHosts(int count) : prefix_("xd" + std::to_string(::getpid()) + "h"), count_(count) {
  remove_leftovers();
  std::ostringstream script;
  script << "ip netns add " << name(count) << "\nip -n " << name(count)
         << " link add bridge type bridge\nip -n " << name(count) << " link set bridge up\n";
  for (int host = 0; host < count; ++host) {
    script << "ip netns add " << name(host) << "\nip link add eth0 netns " << name(host)
           << " type veth peer name port" << host << " netns " << name(count) << "\nip -n "
           << name(count) << " link set port" << host << " master bridge up\nip -n " << name(host)
           << " -batch - <<END\nlink set lo up\nlink set eth0 up\n"
           << addresses(host) << "END\n";
  }
  try {
    run(script.str());
  } catch (...) {
    for (int host = 0; host <= count_; ++host) succeeds("ip netns del " + name(host));
    throw;
  }
}

NetHosts::~NetHosts() {
  for (int host = 0; host <= count_; ++host) succeeds("ip netns del " + name(host));
}

std::string NetHosts::name(int host) const { return prefix_ + std::to_string(host); }

std::string NetHosts::address(int host, Family family) const {
  return (family == Family::ipv4 ? "10.97.0." : "fd97::") + std::to_string(host + 1);
}

void NetHosts::set_link(int host, bool up) {
  // Its addresses of IPv6 go with the link.
  run(up ? "ip -n " + name(host) + " link set eth0 up\nip -n " + name(host) +
               " -force -batch - <<END 2>/dev/null || true\n" + addresses(host) + "END\n"
         : "ip -n " + name(host) + " link set eth0 down");
}

void NetHosts::drop(int host, Way way) {
  std::string rules = "table inet xd {\n";
  if (way != Way::out)
    rules += "chain in { type filter hook input priority 0; iifname eth0 drop; }\n";
  if (way != Way::in)
    rules += "chain out { type filter hook output priority 0; oifname eth0 drop; }\n";
  run("ip netns exec " + name(host) + " nft -f - <<END\n" + rules + "}\nEND");
}

void NetHosts::lose(int host, int percent) {
  const std::string rule = "eth0 numgen random mod 100 < " + std::to_string(percent) + " drop; }\n";
  run("ip netns exec " + name(host) + " nft -f - <<END\ntable inet xd {\n" +
      "chain in { type filter hook input priority 0; iifname " + rule +
      "chain out { type filter hook output priority 0; oifname " + rule + "}\nEND");
}

void NetHosts::admit_ports(int host, int first, int last, const std::string& otherwise) {
  run("ip netns exec " + name(host) + " nft -f - <<END\nflush ruleset\ntable inet xd {\n" +
      "chain in { type filter hook input priority 0; iifname eth0 tcp flags & (syn | ack) == syn " +
      "tcp dport != " + std::to_string(first) + "-" + std::to_string(last) + " " + otherwise +
      "; }\n}\nEND");
}

void NetHosts::refuse(int host, const std::string& with) {
  run("ip netns exec " + name(host) + " nft -f - <<END\ntable inet xd {\n" +
      "chain in { type filter hook input priority 0; iifname eth0 meta l4proto tcp reject with " +
      with + "; }\n}\nEND");
}

void NetHosts::translate(int host, int first, int last) {
  const std::string other = "10.97.0." + std::to_string(host + 101);
  run("ip -n " + name(host) + " addr add " + other + "/24 dev eth0\nip netns exec " + name(host) +
      " nft -f - <<END\ntable ip xd {\n" +
      "chain out { type nat hook postrouting priority 100; oifname eth0 tcp dport != " +
      std::to_string(first) + "-" + std::to_string(last) + " snat to " + other + "; }\n}\nEND");
}

void NetHosts::set_mtu(int host, int bytes) {
  const std::string mtu = " mtu " + std::to_string(bytes);
  run("ip -n " + name(host) + " link set eth0" + mtu + "\nip -n " + name(count_) +
      " link set port" + std::to_string(host) + mtu);
}

void NetHosts::drop_longer(int host, int bytes) {
  const std::string rule = "eth0 meta length > " + std::to_string(bytes) + " drop; }\n";
  run("ip netns exec " + name(host) + " nft -f - <<END\ntable inet xd {\n" +
      "chain in { type filter hook input priority 0; iifname " + rule +
      "chain out { type filter hook output priority 0; oifname " + rule + "}\nEND");
}

void NetHosts::throttle(int host, int megabits) {
  run("tc -n " + name(host) + " qdisc add dev eth0 root tbf rate " + std::to_string(megabits) +
      "mbit burst 32kbit latency 400ms");
}

void NetHosts::add_dead_interface(int host) {
  run("ip -n " + name(host) + " link add eth1 type veth peer name nowhere\nip -n " + name(host) +
      " link set nowhere up\nip -n " + name(host) + " link set eth1 up\nip -n " + name(host) +
      " addr add 10.98.0." + std::to_string(host + 1) + "/24 dev eth1");
}

}  // namespace xd::test
