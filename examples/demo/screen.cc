#include "screen.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace demo {
namespace {

// Columns of the terminal where standard output ends, 0 if that is no terminal. crossdock-run
// passes the lines of several processes on through pipes: then what counts is where its own output
// goes.
int terminal_columns() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) return size.ws_col;
  if (std::getenv("XD_RUN_KIND") == nullptr) return 0;
  const std::string path = "/proc/" + std::to_string(::getppid()) + "/fd/1";
  const int launcher_output = ::open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (launcher_output < 0) return 0;
  const bool terminal = ::ioctl(launcher_output, TIOCGWINSZ, &size) == 0;
  ::close(launcher_output);
  return terminal ? size.ws_col : 0;
}

}  // namespace

Screen::Screen() {
  const int columns = terminal_columns();
  terminal_ = columns > 0;
  width_ = terminal_ ? std::clamp(columns, 40, 120) : 80;
}

std::string Screen::coloured(const char* code, const std::string& text) const {
  return terminal_ ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
}

void Screen::heading(const std::string& text) const {
  std::printf("\n%s\n", coloured("1", text).c_str());
}

void Screen::progress(int done, int total, const std::string& text) {
  if (!terminal_) return;
  const int room = std::max(width_ - static_cast<int>(text.size()) - 6, 10);
  const int filled = room * done / std::max(total, 1);
  rewrite("  [" + coloured("36", std::string(static_cast<std::size_t>(filled), '#')) +
          std::string(static_cast<std::size_t>(room - filled), '.') + "] " + text);
}

void Screen::finish_progress(const std::string& text) { rewrite(text); }

// Whole lines only: they are what crossdock-run passes on.
void Screen::rewrite(const std::string& line) {
  std::printf("%s%s\n", progress_shown_ ? "\033[1A\r\033[K" : "", line.c_str());
  std::fflush(stdout);
  progress_shown_ = terminal_;
}

void Screen::bars(const std::vector<Bar>& bars) const {
  std::size_t label = 0, text = 0;
  double largest = 0;
  for (const Bar& bar : bars) {
    label = std::max(label, bar.label.size());
    text = std::max(text, bar.text.size());
    largest = std::max(largest, bar.value);
  }
  const int room = std::max(width_ - static_cast<int>(label + text) - 5, 10);
  for (const Bar& bar : bars) {
    const long length = largest > 0 ? std::lround(bar.value / largest * room) : 0;
    std::printf("  %-*s %*s %s\n", static_cast<int>(label), bar.label.c_str(),
                static_cast<int>(text), bar.text.c_str(),
                coloured("36", std::string(static_cast<std::size_t>(length), '#')).c_str());
  }
}

std::string Screen::verdict(bool right) const {
  return right ? coloured("32", "right") : coloured("1;31", "WRONG");
}

}  // namespace demo
