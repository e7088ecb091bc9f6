// The program net-stranger (net/stranger.c), run by a test.
#pragma once

#include <stdio.h>

#include <array>
#include <string>

namespace xd::test {

// The words of a stranger who tries for a second to reach a port. `before`: words of the shell in
// front of the command.
inline std::string stranger_says(const std::string& before, const std::string& own_address,
                                 const std::string& address, int port, const std::string& mode) {
  const std::string command = before + XD_TEST_STRANGER " " + own_address + " " + address + " " +
                              std::to_string(port) + " " + mode + " 1";
  FILE* const output = ::popen(command.c_str(), "r");
  std::array<char, 256> line{};
  std::string last;
  while (output != nullptr && ::fgets(line.data(), line.size(), output) != nullptr)
    last = line.data();
  if (output != nullptr) ::pclose(output);
  return last.substr(0, last.find('\n'));
}

}  // namespace xd::test
