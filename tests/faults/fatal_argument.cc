#include "faults/fatal_argument.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "support/plan_format.h"

namespace xd::test {
namespace {

// The alignment of the library's arguments; no operation touches less of a row's end.
constexpr std::size_t kEndBytes = 16;

const Buffer& buffer_of(Batch& batch, const RankProgram& program) {
  const std::string& name = program.fatal_argument;
  return name == "plan" ? batch.plan()
                        : batch.field(program.bulk_operation(), name).tensor->buffer();
}

}  // namespace

Pages::Pages(std::size_t bytes) : bytes_(round_up(bytes)) {
  void* at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap failed");
  data_ = static_cast<std::byte*>(at);
}

Pages::~Pages() { ::munmap(data_, bytes_); }

void Pages::forbid(std::size_t from) const {
  if (::mprotect(data_ + from, bytes_ - from, PROT_NONE) != 0) {
    throw std::runtime_error("mprotect failed");
  }
}

std::size_t Pages::round_up(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

FatalArgument::FatalArgument(Batch& batch, const RankProgram& program)
    : extent_(extent_of(buffer_of(batch, program).bytes(), program.death.part)),
      pages_(extent_.begin + buffer_of(batch, program).bytes()) {
  std::byte* const to = pages_.data() + extent_.begin;
  std::ranges::copy(buffer_of(batch, program).read(), to);
  replace(batch, program, to);
  pages_.forbid(extent_.fatal);
}

FatalArgument::Extent FatalArgument::extent_of(std::size_t bytes, Part part) {
  if (part == Part::all) return {0, 0};
  // The argument begins at a multiple of kEndBytes, and its fatal part begins a page: so what lies
  // before that part is a multiple too, which a header need not be.
  const std::size_t before = part == Part::body
                                 ? (kPlanHeaderBytes + kEndBytes - 1) / kEndBytes * kEndBytes
                                 : (bytes - 1) / kEndBytes * kEndBytes;
  const std::size_t fatal = Pages::round_up(before);
  return {fatal - before, fatal};
}

void FatalArgument::replace(Batch& batch, const RankProgram& program, std::byte* to) {
  if (program.fatal_argument != "plan") {
    const Batch::Field& field = batch.field(program.bulk_operation(), program.fatal_argument);
    tensor_ = **field.slot;
    tensor_.data = to;
    *field.slot = &tensor_;
  } else if (program.operation == XD_EP_PREPARE) {
    batch.prepare_args.plan = to;
  } else {
    batch.use_plan(to, batch.plan().bytes());
  }
}

}  // namespace xd::test
