// Replaces operator new of the program, library included, by one that can be told to fail.
#pragma once

namespace xd::test {

// The allocations that count.
enum class Of {
  this_thread,  // the one that arms the fault
  thread,       // all threads of one name
  process,
};

// While the object lives, the n-th allocation from now on throws std::bad_alloc, and with `lasting`
// also all later ones. A process has one at a time.
class MemoryFault {
 public:
  struct Spec {
    Of of = Of::this_thread;
    const char* thread = "";
    bool lasting = false;
  };
  MemoryFault(const Spec& spec, long nth);
  ~MemoryFault();
  MemoryFault(const MemoryFault&) = delete;
  MemoryFault& operator=(const MemoryFault&) = delete;

  bool struck() const;  // the n-th allocation has been asked for
};

}  // namespace xd::test
