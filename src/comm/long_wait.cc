#include "comm/long_wait.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "comm/errors.h"

namespace xd {
namespace {

std::string words_of(const WaitNote& note) {
  return {note.call.data(), ::strnlen(note.call.data(), note.call.size())};
}

thread_local std::string story;

}  // namespace

LongWait::~LongWait() {
  if (id_ == 0) return;
  show(-1);
  errors_.notes().end(id_);
}

void LongWait::show(int peer) {
  if (shown_ == peer) return;
  shown_ = peer;
  errors_.notes().with_course(group_, operation_, [&](Course& course) { course.show_wait(peer); });
}

void LongWait::begin(const WaitPlace& place) {
  id_ = errors_.notes().new_id();
  group_ = place.group;
  operation_ = place.operation;
  warning_ = Clock::now() + kWarning - kFirstLook;
  call_ = place.call.empty() ? errors_.call_text(place.group, place.operation, place.epoch)
                             : place.call;
}

void LongWait::look(const WaitPlace& place, int peer) {
  next_look_ = Clock::now() + kBetweenLooks;
  try {
    look_now(place, peer);
  } catch (const std::bad_alloc&) {  // the wait needs no memory
  }
}

void LongWait::look_now(const WaitPlace& place, int peer) {
  if (id_ == 0) begin(place);
  WaitNotes& notes = errors_.notes();
  show(peer);
  const WaitNote theirs = peer >= 0 ? notes.of(peer) : WaitNote{};
  WaitNote mine;
  mine.id = id_;
  mine.epoch = place.epoch;
  mine.peer = peer;
  mine.group = place.group;
  mine.operation = place.operation;
  mine.phase = place.phase;
  std::copy_n(call_.begin(), std::min(call_.size(), mine.call.size() - 1), mine.call.begin());
  const bool alone = !notes.several_threads() && theirs.several_threads == 0;
  // A host call waits for all ranks that have not come to it.
  const bool waits_here = theirs.id != 0 && (theirs.peer == errors_.rank() || theirs.operation < 0);
  if (alone && waits_here && !notes.has_come(theirs)) {
    mine.confirm(theirs);
    mine.joins = joins_ && place.operation < 0 && notes.can_join(theirs) ? 1 : 0;
  }
  notes.tell(mine);
  const bool in_circle = mine.confirms != 0 && theirs.has_confirmed(mine);
  // A rank in a host call waits for the peer's part with a failure, and joins then.
  if (in_circle && mine.joins == 0 && env().step_check != 0) leave_circle(place, peer, theirs);
  if (Clock::now() >= warning_ && (in_circle || place.operation < 0)) warn(peer);
}

void LongWait::leave_circle(const WaitPlace& place, int peer, const WaitNote& theirs) {
  const RankNames& names = errors_.names();
  const std::string own = names.of(errors_.rank());
  const std::string text =
      concat(own, " waits in ", call_, " for ", names.of(peer), ", which waits in ",
             words_of(theirs), " for ", own, ": expected the same calls on all ranks");
  if (theirs.joins != 0 && !errors_.notes().is_joining()) {
    story = text;
    try {
      const OutOfStep what{place.group, place.operation, place.epoch};
      errors_.notes().fail_round(what, theirs.epoch, text, place.deadline);
    } catch (const Error&) {
      errors_.throw_if_failed();  // of another error, the wait has more to say
    }
    return;
  }
  errors_.raise_and_throw(ToldError({.status = XD_ERROR_MISMATCH,
                                     .phase = place.phase,
                                     .rank = errors_.rank(),
                                     .peer = peer,
                                     .group = place.group,
                                     .operation = place.operation,
                                     .expected_epoch = place.epoch},
                                    text),
                          Spread::everywhere);
}

std::string LongWait::take_story() { return std::exchange(story, {}); }

// Once for each wait.
void LongWait::warn(int peer) {
  warning_ = Clock::time_point::max();
  const RankNames& names = errors_.names();
  log_warning(names.of(errors_.rank()), " has waited 5 s in ", call_, " for ",
              peer >= 0 ? names.of(peer) : "other ranks",
              peer >= 0 ? follow_waits(errors_, peer).words : "");
}

ToldError with_waits(const Errors& errors, const FatalError& timeout) {
  ToldError told(timeout);
  if (timeout.peer < 0) return told;
  try {
    const WaitChain chain = follow_waits(errors, timeout.peer);
    told = ToldError(timeout, chain.words);
    if (chain.last != timeout.peer) told.about = chain.last;
  } catch (const std::bad_alloc&) {  // the error remains
  }
  return told;
}

WaitChain follow_waits(const Errors& errors, int peer) {
  WaitChain chain{peer, ""};
  std::vector<int> met{errors.rank(), peer};
  for (;;) {
    const WaitNote note = errors.notes().of(chain.last);
    if (note.id == 0 || note.peer < 0 || note.peer == chain.last) return chain;
    const std::string call = words_of(note);
    chain.words += concat(", which waits in ", call.substr(0, call.find(" (")), " for ",
                          errors.names().of(note.peer));
    if (note.several_threads != 0) return chain;  // another thread of it may be the one
    if (std::ranges::find(met, note.peer) != met.end()) {
      // A circle, and nobody in it is more to blame than the first.
      chain.last = peer;
      return chain;
    }
    chain.last = note.peer;
    met.push_back(note.peer);
  }
}

}  // namespace xd
