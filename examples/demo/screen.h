// Tables, bars and progress on standard output; colours and moving lines on a terminal only.
#pragma once

#include <string>
#include <vector>

namespace demo {

class Screen {
 public:
  Screen();

  void heading(const std::string& text) const;
  // A line that is drawn over on a terminal, and left out elsewhere.
  void progress(int done, int total, const std::string& text);
  // Puts a text that stays in place of the progress line.
  void finish_progress(const std::string& text);

  struct Bar {
    std::string label;
    double value;
    std::string text;  // before the bar
  };
  // The longest bar takes what the terminal is wide.
  void bars(const std::vector<Bar>& bars) const;
  // "right" in green, "WRONG" in red.
  std::string verdict(bool right) const;

 private:
  std::string coloured(const char* code, const std::string& text) const;

  void rewrite(const std::string& line);

  bool terminal_ = false;
  int width_ = 80;
  bool progress_shown_ = false;
};

}  // namespace demo
