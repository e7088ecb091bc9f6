#include "faults/fatal_argument.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace xd::test {
namespace {

// The alignment of the library's arguments; no operation touches less of a row's end.
constexpr std::size_t kEndBytes = 16;

const Buffer& buffer_of(Batch& batch, const RankProgram& program) {
  const std::string& name = program.death.argument;
  return name == "plan" ? batch.plan() : batch.field(program.operation, name).tensor->buffer();
}

}  // namespace

Pages::Pages(std::size_t bytes)
    : fd_(::memfd_create("fatal", MFD_CLOEXEC)), bytes_(round_up(bytes)) {
  if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) {
    throw std::runtime_error("no memory file");
  }
  void* at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap failed");
  data_ = static_cast<std::byte*>(at);
}

Pages::~Pages() {
  ::munmap(data_, bytes_);
  ::close(fd_);
}

void Pages::forbid(std::size_t from) const {
  if (::mprotect(data_ + from, bytes_ - from, PROT_NONE) != 0) {
    throw std::runtime_error("mprotect failed");
  }
}

std::vector<std::uint32_t> Pages::words() const {
  std::vector<std::uint32_t> words(bytes_ / sizeof(std::uint32_t));
  if (::pread(fd_, words.data(), bytes_, 0) != static_cast<ssize_t>(bytes_)) {
    throw std::runtime_error("pread failed");
  }
  return words;
}

std::size_t Pages::round_up(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

FatalArgument::FatalArgument(Batch& batch, const RankProgram& program, int rank,
                             const std::function<void()>& on_armed)
    : extent_(extent_of(buffer_of(batch, program).bytes(), program.death.part)),
      pages_(extent_.begin + buffer_of(batch, program).bytes()) {
  const std::vector<std::byte> bytes = buffer_of(batch, program).read();
  std::byte* const to = pages_.data() + extent_.begin;
  std::ranges::copy(bytes, to);
  replace(batch, program, to);
  if (program.death.part != Part::second_pass) {
    pages_.forbid(extent_.fatal);
    return;
  }
  std::memset(to, 0, bytes.size());
  const std::vector<std::int64_t>& ids = batch.routed().choices(rank).ids;
  watcher_ =
      std::thread([this, ids = std::vector<std::uint32_t>(ids.begin(), ids.end()), on_armed] {
        await_first_pass(ids);
        if (!over_) on_armed();
      });
}

FatalArgument::~FatalArgument() {
  over_ = true;
  if (watcher_.joinable()) watcher_.join();
}

FatalArgument::Extent FatalArgument::extent_of(std::size_t bytes, Part part) {
  if (part != Part::end) return {0, 0};
  const std::size_t before = (bytes - 1) / kEndBytes * kEndBytes;
  const std::size_t fatal = Pages::round_up(before);
  return {fatal - before, fatal};
}

void FatalArgument::replace(Batch& batch, const RankProgram& program, std::byte* to) {
  if (program.death.argument != "plan") {
    const Batch::Field& field = batch.field(program.operation, program.death.argument);
    tensor_ = **field.slot;
    tensor_.data = to;
    *field.slot = &tensor_;
  } else if (program.operation == XD_EP_PREPARE) {
    batch.prepare_args.plan = to;
  } else {
    batch.use_plan(to, batch.plan().bytes());
  }
}

// Between its two passes prepare keeps the choices' expert ids in the plan; when all are there, the
// first pass writes no more. They are looked at through the file: loads from the mapping would race
// with the stores.
void FatalArgument::await_first_pass(const std::vector<std::uint32_t>& ids) {
  const auto filled = [&] {
    const std::vector<std::uint32_t> words = pages_.words();
    return !std::ranges::search(words, ids).empty();
  };
  while (!over_ && !filled()) std::this_thread::yield();
  pages_.forbid(0);
}

}  // namespace xd::test
