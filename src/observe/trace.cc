#include "observe/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/fd.h"
#include "base/log.h"

namespace xd::observe {
namespace {

// The text as the inside of a JSON string: bytes that such a string cannot have are left out.
std::string json_text(std::string_view text) {
  std::string json;
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) json += c;
  }
  return json;
}

// The trace file of this process.
class File {
 public:
  static File& instance() {
    static File* const file = new File;  // spans may end after static objects have gone
    return *file;
  }

  void append(std::string_view line) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      if (pid_ != ::getpid()) begin();
      if (!fd_) return;
      buffer_ += line;
      if (buffer_.size() >= kFull) write();
    } catch (...) {
      buffer_.clear();  // no memory: these spans are lost
    }
  }
  void flush() noexcept {
    const std::lock_guard lock(mutex_);
    if (pid_ == ::getpid()) write();
  }

 private:
  static constexpr std::size_t kFull = std::size_t{1} << 16;

  // Also in a fork, whose parent goes on with its own file.
  void begin() {
    pid_ = ::getpid();
    buffer_.clear();
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    const std::string path = concat(env().trace, "/", host.data(), "-", pid_, ".trace.json");
    fd_.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!fd_) {
      log_warning("XD_TRACE: ", path, " cannot be written: ", std::strerror(errno),
                  "; there is no trace of this process");
      return;
    }
    buffer_ = "[\n";
    std::atexit([] { Track::flush(); });
  }
  void write() noexcept {
    std::string_view rest = buffer_;
    while (!rest.empty()) {
      const ssize_t written = ::write(fd_.get(), rest.data(), rest.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) break;  // a full disk costs spans and nothing else
      rest.remove_prefix(static_cast<std::size_t>(written));
    }
    buffer_.clear();
  }

  std::mutex mutex_;
  pid_t pid_ = -1;
  UniqueFd fd_;
  std::string buffer_;
};

}  // namespace

Track::Track(const Identity& identity) {
  if (!tracing()) return;
  static std::atomic<std::uint64_t> numbers{0};
  number_ = ++numbers;
  try {
    File::instance().append(concat(R"({"ph":"M","name":"process_name","pid":)", ::getpid(),
                                   R"(,"args":{"name":"rank )", identity.rank, R"("}},)", "\n",
                                   R"({"ph":"M","name":"process_sort_index","pid":)", ::getpid(),
                                   R"(,"args":{"sort_index":)", identity.rank, "}},\n"));
  } catch (...) {
    number_ = 0;
  }
}

void Track::set_title(std::string_view title) const noexcept {
  if (!on()) return;
  try {
    File::instance().append(concat(R"({"ph":"M","name":"thread_name","pid":)", ::getpid(),
                                   R"(,"tid":)", number_, R"(,"args":{"name":")", json_text(title),
                                   "\"}},\n"));
  } catch (...) {  // no memory: a line without a title
  }
}

void Track::span(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns,
                 const char* detail) const noexcept {
  if (!on()) return;
  std::array<char, 512> line;
  const int length = std::snprintf(
      line.data(), line.size(),
      R"({"ph":"X","name":"%s","pid":%d,"tid":%llu,"ts":%llu.%03u,"dur":%llu.%03u%s%s%s},)"
      "\n",
      name, ::getpid(), static_cast<unsigned long long>(number_),
      static_cast<unsigned long long>(begin_ns / 1000), static_cast<unsigned>(begin_ns % 1000),
      static_cast<unsigned long long>((end_ns - begin_ns) / 1000),
      static_cast<unsigned>((end_ns - begin_ns) % 1000),
      detail != nullptr ? R"(,"args":{"is":")" : "", detail != nullptr ? detail : "",
      detail != nullptr ? R"("})" : "");
  if (length <= 0 || length >= static_cast<int>(line.size())) return;
  File::instance().append({line.data(), static_cast<std::size_t>(length)});
}

void Track::flush() noexcept {
  if (tracing()) File::instance().flush();
}

}  // namespace xd::observe
