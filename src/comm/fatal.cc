#include "comm/fatal.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/error.h"
#include "base/math.h"
#include "meet/rank_names.h"

namespace xd {
namespace {

// A board that was damaged may hold any bytes.
template <std::size_t kBytes>
std::string_view text_in(const std::array<char, kBytes>& bytes) {
  return {bytes.data(), ::strnlen(bytes.data(), bytes.size())};
}

std::string site(const ToldError& error, const Operations* operations) {
  if (error.call[0] != '\0') return std::string(text_in(error.call));
  return call_text(error.group, error.operation, error.expected_epoch, operations);
}

const char* awaited(std::int32_t phase) {
  switch (phase) {
    case XD_PHASE_ENTRY:
      return "to enter the operation";
    case XD_PHASE_COUNTS:
      return "to send its counts";
    case XD_PHASE_ROWS:
      return "to bring its rows";
    case XD_PHASE_CREDIT:
      return "to take an earlier operation";
    case XD_PHASE_DONE:
      return "to finish with this rank's memory";
    default:
      return "to take part";
  }
}

// Host calls are not numbered.
std::string epochs(const FatalError& error) {
  if (error.operation < 0) return "";
  return concat(": expected epoch ", error.expected_epoch, ", seen ", error.seen_epoch);
}

std::string lost_text(const FatalError& error, const RankNames& names) {
  // A board that was damaged may hold any count.
  const auto count =
      std::clamp<std::int32_t>(error.num_lost, 0, static_cast<std::int32_t>(error.lost.size()));
  std::span<const int> ranks(error.lost.data(), at(count));
  if (ranks.empty()) ranks = {&error.peer, 1};
  std::string pid = names.process_of(ranks.front());  // they are of one process
  if (!pid.empty()) pid = concat(" (", pid, ")");
  return concat(names.of(ranks), ranks.size() == 1 ? " was" : " were", " lost: ",
                error.timeout_ms > 0
                    ? concat("the host has not answered for ", error.timeout_ms, " ms")
                    : concat("the process has ended or broken the protocol", pid));
}

// Of another rank's words: their receiver knows more, where that is a host.
bool is_of_chunk(const FatalError& error) {
  const bool of_words = error.phase == XD_PHASE_ENTRY || error.phase == XD_PHASE_COUNTS ||
                        error.phase == XD_PHASE_ROWS;
  return error.status == XD_ERROR_INTERNAL && error.met_by_all == 0 && of_words &&
         error.peer >= 0 && error.peer != error.rank;
}

std::string cause(const FatalError& error, const RankNames& names) {
  if (is_of_chunk(error))
    return concat(": ", names.of(error.peer), " has sent a chunk that cannot be");
  if (error.error_number == 0) return "";
  return concat(": ", std::strerror(error.error_number), " (errno ", error.error_number, ")");
}

}  // namespace

std::string call_text(int group, int operation, std::uint64_t epoch, const Operations* operations) {
  if (operation < 0) return group < 0 ? "a collective host call" : concat("group ", group);
  const std::string name = operations != nullptr
                               ? concat(operations->prefix, operations->name(operation))
                               : concat("operation ", operation);
  return concat(name, " of group ", group, ", epoch ", epoch);
}

xd_status status_of(const FatalError& error) {
  const bool known = error.status > XD_SUCCESS && error.status <= XD_ERROR_INTERNAL;
  return known ? static_cast<xd_status>(error.status) : XD_ERROR_INTERNAL;
}

std::string describe(const ToldError& error, const Operations* operations, const RankNames& names) {
  if (error.status == XD_ERROR_MISMATCH && error.words[0] != '\0')
    return std::string(text_in(error.words));
  switch (error.status) {
    case XD_ERROR_TIMEOUT:
      if (error.peer < 0) {
        return concat(names.of(error.rank), " waited ", error.timeout_ms, " ms in ",
                      site(error, operations), " for ranks that did not ",
                      error.phase == XD_PHASE_ROWS ? "bring their rows" : "take part");
      }
      return concat(names.of(error.rank), " waited ", error.timeout_ms, " ms in ",
                    site(error, operations), " for ", names.with_process(error.peer),
                    error.words[0] != '\0' ? "" : concat(" ", awaited(error.phase)),
                    text_in(error.words), epochs(error));
    case XD_ERROR_PEER_LOST:
      if (error.left == 0) return lost_text(error, names);
      return concat(names.of(error.peer), " has left the communicator and is needed by ",
                    site(error, operations));
    case XD_ERROR_ABORTED:
      return concat(names.of(error.peer), " called xd_comm_abort, or was interrupted");
    case XD_ERROR_BUSY:
      return concat(
          names.of(error.rank), " used group ", error.group,
          " at once by two threads or streams; the operations of a group form one sequence");
    default:
      return concat(
          "fatal error ", status_name(status_of(error)), " raised by ", names.of(error.rank),
          error.deaf != 0 ? ": its watch thread had to end" : " in " + site(error, operations),
          cause(error, names));
  }
}

}  // namespace xd
