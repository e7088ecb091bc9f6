#include "observe/subject.h"

#include <algorithm>
#include <sstream>
#include <string>

#include "base/log.h"

namespace xd::observe {
namespace {

Identity with_operations(Identity identity, const Operations& operations) {
  identity.first_operation = operations.first;
  return identity;
}

std::string milliseconds(std::uint64_t ns) {
  std::ostringstream text;
  text.precision(3);
  text << std::fixed << static_cast<double>(ns) / 1e6 << " ms";
  return text.str();
}

}  // namespace

Subject::Subject(const Identity& identity, const Operations& operations, std::string_view comm)
    : operations_(operations),
      place_(with_operations(identity, operations)),
      seen_(static_cast<std::size_t>(identity.num_ranks)),
      track_(identity) {
  counters().comm.set(comm);
}

Subject::~Subject() {
  if (log_enabled("stats")) log();
  Track::flush();
}

// The lines of a trace: one for each group of a rank, and one for its device.
void Subject::set_title() const noexcept {
  if (!track_.on()) return;
  try {
    const Counters& c = counters();
    const Text::Bytes name = c.name.get();
    const std::string number = concat("group ", c.identity.number);
    const std::string title =
        concat("rank ", c.identity.rank, ": ", name[0] != 0 ? name.data() : number.c_str());
    track_.set_title(concat(title, " (", c.detail.get().data(), ")"));
    device_track_.set_title(concat(title, ", on the device"));
  } catch (...) {  // no memory: the title is what it was
  }
}

// One line, of what is not zero.
void Subject::log() const noexcept {
  try {
    const Counters& c = counters();
    std::ostringstream text;
    text << "rank " << c.identity.rank << " of " << c.identity.num_ranks << ", "
         << "group " << c.identity.number;
    if (const auto name = c.name.get(); name[0] != 0) text << " '" << name.data() << "'";
    text << " (" << c.detail.get().data() << "):";
    for (std::size_t i = 0; i < operations_.names.size(); ++i) {
      if (c.calls[i].get() == 0) continue;
      text << ' ' << c.calls[i].get() << ' ' << operations_.names[i] << " in "
           << milliseconds(c.call_ns[i].get()) << ',';
    }
    const auto tell = [&](const Number& number, const char* what) {
      if (number.get() != 0) text << ' ' << number.get() << ' ' << what << ',';
    };
    tell(c.tokens, "tokens");
    tell(c.token_bytes, "bytes of tokens");
    tell(c.rows, "rows");
    tell(c.row_bytes, "bytes of rows");
    tell(c.net_puts, "puts to other machines");
    tell(c.net_bytes, "bytes of puts");
    tell(c.staged_tensors, "staged tensors");
    tell(c.failed_calls, "failed calls");
    tell(c.bad_ids, "bad ids");
    tell(c.dropped_rows, "dropped rows");
    for (std::size_t r = 0; r < waits().size(); ++r) {
      if (waits()[r].get() == 0) continue;
      text << " waited " << milliseconds(waits()[r].get()) << " for rank " << r << ',';
    }
    std::string line = text.str();
    line.pop_back();
    log_topic("stats", line);
  } catch (...) {
    log_topic("stats", "(no memory for its text)");
  }
}

WaitTimes::WaitTimes(Subject& subject, std::int64_t* of_caller)
    : subject_(subject), of_caller_(of_caller) {
  std::fill(subject_.seen().begin(), subject_.seen().end(), char{0});
  if (of_caller_ != nullptr) begun_ = now_ns();
}

void WaitTimes::wait_for(int peer) {
  waits_for_ = peer;
  subject_.counters().waits_for.set(static_cast<std::uint64_t>(peer) + 1);
}

void WaitTimes::add(int peer, std::uint64_t ns) {
  subject_.waits()[static_cast<std::size_t>(peer)].add(ns);
  if (of_caller_ != nullptr) of_caller_[peer] += static_cast<std::int64_t>(ns);
}

}  // namespace xd::observe
