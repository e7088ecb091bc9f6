// Programs of tests run on the library that people use, and on the tests' own library
// (net/engines/network.cc) where XD_NET_TEST asks for a network of tests.
#pragma once

namespace xd::test {

// Begins the program anew on the tests' library if XD_NET_TEST is set and it has another one. To be
// called first in main(). Throws std::runtime_error.
void take_instruments(char** arguments);

}  // namespace xd::test
