#include "screen.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace demo {
namespace {

int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return std::clamp<int>(size.ws_col, 40, 120);
}

}  // namespace

Screen::Screen() : terminal_(::isatty(STDOUT_FILENO) == 1), width_(terminal_width()) {}

std::string Screen::coloured(const char* code, const std::string& text) const {
  return terminal_ ? "\033[" + std::string(code) + "m" + text + "\033[0m" : text;
}

void Screen::heading(const std::string& text) const {
  std::printf("\n%s\n", coloured("1", text).c_str());
}

void Screen::progress(int done, int total, const std::string& text) const {
  if (!terminal_) return;
  const int room = std::max(width_ - static_cast<int>(text.size()) - 4, 10);
  const int filled = room * done / std::max(total, 1);
  std::printf("\r[%s%s] %s", std::string(static_cast<std::size_t>(filled), '#').c_str(),
              std::string(static_cast<std::size_t>(room - filled), '.').c_str(), text.c_str());
  std::fflush(stdout);
}

void Screen::finish_progress(const std::string& text) const {
  std::printf("%s%s\n", terminal_ ? "\r\033[K" : "", text.c_str());
  std::fflush(stdout);
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
    const int length = largest > 0 ? static_cast<int>(bar.value / largest * room + 0.5) : 0;
    std::printf("  %-*s %*s %s\n", static_cast<int>(label), bar.label.c_str(),
                static_cast<int>(text), bar.text.c_str(),
                coloured("36", std::string(static_cast<std::size_t>(length), '#')).c_str());
  }
}

std::string Screen::verdict(bool right) const {
  return right ? coloured("32", "right") : coloured("1;31", "WRONG");
}

}  // namespace demo
