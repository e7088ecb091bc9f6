#include "capi/boundary.h"

#include <cstdio>
#include <new>
#include <string>

namespace xd {

Whereabouts::Whereabouts(const Comm& comm) noexcept {
  std::string number;
  try {
    number = comm.errors().names().number_of(comm.rank());
  } catch (const std::bad_alloc&) {  // the text lacks it
  }
  const bool has_number = !number.empty(), has_name = !comm.name().empty();
  // As much of a name as `crossdock top` keeps.
  std::snprintf(text.data(), text.size(), " [rank %d of %d%s%s%s%s%.63s%s]", comm.rank(),
                comm.num_ranks(), has_number ? " (" : "", number.c_str(), has_number ? ")" : "",
                has_name ? " in '" : "", comm.name().c_str(), has_name ? "'" : "");
}

}  // namespace xd
