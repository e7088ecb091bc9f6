// Options of a command line whose values are numbers or words, with errors that say what is
// expected.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "workload.h"

namespace bench {

inline constexpr int kMost = 1 << 24;

// Adds an option whose value is a whole number.
template <class T>
void number(CLI::App& app, const std::string& option, T& field, T least, T most) {
  app.add_option(option, field)
      ->check(CLI::Validator(
          [least, most](const std::string& text) -> std::string {
            T value{};
            const char* const begin = text.data();
            const char* const end = begin + text.size();
            const auto [stop, error] = std::from_chars(begin, end, value);
            if (error == std::errc() && stop == end && value >= least && value <= most) return {};
            return "expected a whole number from " + std::to_string(least) + " to " +
                   std::to_string(most) + ", got '" + text + "'";
          },
          "", ""));
}

// Adds an option whose value is one of some words.
template <class T>
void word(CLI::App& app, const std::string& option, T& field, const std::vector<T>& choices) {
  std::string expected;
  std::vector<std::pair<std::string, T>> words;
  for (const T choice : choices) {
    words.emplace_back(name_of(choice), choice);
    expected += std::string(expected.empty() ? "" : ", ") + name_of(choice);
  }
  app.add_option_function<std::string>(option, [option, expected, words,
                                                &field](const std::string& text) {
    for (const auto& [name, choice] : words) {
      if (text == name) {
        field = choice;
        return;
      }
    }
    throw std::invalid_argument(option + ": expected one of " + expected + ", got '" + text + "'");
  });
}

// Parses all options, or throws std::invalid_argument.
inline void parse_all(CLI::App& app, std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    throw std::invalid_argument(error.what());
  }
}

}  // namespace bench
