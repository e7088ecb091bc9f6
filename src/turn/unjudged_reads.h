// Reads of a peer's memory into which the peer may be storing.
//
// A peer that has masked this rank does not wait until this rank has read what it was sent. So
// where peers can be masked, a rank copies rows first, and asks then whether the peer was still in
// step (PeerMasks::still_in_step). If it was not, the copies are thrown away. ThreadSanitizer
// cannot know that and would report such a read as a race: while an object of this class lives, it
// looks away from what the thread reads and writes.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define XD_UNDER_THREAD_SANITIZER 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define XD_UNDER_THREAD_SANITIZER 1
#endif

#ifdef XD_UNDER_THREAD_SANITIZER
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace xd::turn {

class UnjudgedReads {
 public:
  // `judged_later`: whether still_in_step() is asked after these reads. Elsewhere the peer waits
  // for them, and a race would be a mistake.
  explicit UnjudgedReads([[maybe_unused]] bool judged_later) {
#ifdef XD_UNDER_THREAD_SANITIZER
    judged_later_ = judged_later;
    if (judged_later_) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
#endif
  }
  ~UnjudgedReads() {
#ifdef XD_UNDER_THREAD_SANITIZER
    if (judged_later_) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  }
  UnjudgedReads(const UnjudgedReads&) = delete;
  UnjudgedReads& operator=(const UnjudgedReads&) = delete;

#ifdef XD_UNDER_THREAD_SANITIZER
 private:
  bool judged_later_ = false;
#endif
};

}  // namespace xd::turn
