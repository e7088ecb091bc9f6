#include "routing.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>

namespace bench {
namespace {

// log of each expert's weight.
std::vector<double> log_weights(const Workload& w) {
  double exponent = 0;
  if (w.routing == "zipf") {
    exponent = 1;
  } else if (w.routing.starts_with("zipf:")) {
    const std::string text = w.routing.substr(5);
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), exponent);
    if (error != std::errc() || stop != text.data() + text.size() || !(exponent >= 0)) {
      throw std::invalid_argument("--routing " + w.routing + ": expected zipf:EXPONENT");
    }
  } else if (w.routing != "uniform" && w.routing != "hot") {
    throw std::invalid_argument("--routing " + w.routing +
                                ": expected uniform, zipf, zipf:EXPONENT, hot or file:PATH");
  }
  std::vector<double> logs(static_cast<std::size_t>(w.experts));
  for (std::size_t e = 0; e < logs.size(); ++e) {
    logs[e] = -exponent * std::log(static_cast<double>(e + 1));
  }
  if (w.routing == "hot") logs[0] = 1e9;  // larger than any noise
  return logs;
}

// The topk largest of log weight + Gumbel noise are a weighted draw without replacement.
std::vector<Choices> draw(const Workload& w) {
  const std::vector<double> logs = log_weights(w);
  std::vector<Choices> routing(static_cast<std::size_t>(w.ranks));
  std::vector<double> keys(logs.size());
  std::vector<std::int32_t> experts(logs.size());
  Random random(w.seed);
  for (Choices& choices : routing) {
    for (int t = 0; t < w.tokens; ++t) {
      for (std::size_t e = 0; e < keys.size(); ++e) {
        keys[e] = logs[e] - std::log(-std::log(random.unit()));
      }
      std::iota(experts.begin(), experts.end(), 0);
      std::partial_sort(
          experts.begin(), experts.begin() + w.topk, experts.end(), [&](auto a, auto b) {
            return keys[static_cast<std::size_t>(a)] > keys[static_cast<std::size_t>(b)];
          });
      choices.insert(choices.end(), experts.begin(), experts.begin() + w.topk);
    }
  }
  return routing;
}

std::vector<Choices> read_file(const Workload& w, const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument("--routing file:" + path + ": cannot be read");
  std::vector<Choices> routing(static_cast<std::size_t>(w.ranks));
  for (Choices& choices : routing) {
    for (int i = 0; i < w.tokens * w.topk; ++i) {
      std::int32_t expert = -1;
      if (!(file >> expert) || expert < 0 || expert >= w.experts) {
        throw std::invalid_argument("--routing file:" + path + ": expected " +
                                    std::to_string(w.ranks) + " * " + std::to_string(w.tokens) +
                                    " lines of " + std::to_string(w.topk) + " expert ids below " +
                                    std::to_string(w.experts));
      }
      const auto token = choices.end() - i % w.topk;
      if (std::find(token, choices.end(), expert) != choices.end()) {
        throw std::invalid_argument("--routing file:" + path + ": a token names expert " +
                                    std::to_string(expert) + " twice");
      }
      choices.push_back(expert);
    }
  }
  return routing;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// First row of each local expert's zone of `rank`, and the end of the last one.
std::vector<std::int64_t> zone_offsets(const Workload& w, const std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> offsets(1, 0);
  for (const std::int64_t count : counts) {
    offsets.push_back(offsets.back() + round_up(count, w.alignment));
  }
  return offsets;
}

std::vector<std::int64_t> count_local(const Workload& w, const std::vector<Choices>& routing,
                                      int rank) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(w.local_experts()));
  for (const Choices& choices : routing) {
    for (const std::int32_t expert : choices) {
      if (expert / w.local_experts() == rank) {
        ++counts[static_cast<std::size_t>(expert % w.local_experts())];
      }
    }
  }
  return counts;
}

}  // namespace

std::vector<Choices> make_routing(const Workload& w) {
  return w.routing.starts_with("file:") ? read_file(w, w.routing.substr(5)) : draw(w);
}

std::vector<std::vector<std::int64_t>> count_rows(const Workload& w,
                                                  const std::vector<Choices>& routing) {
  const auto ranks = static_cast<std::size_t>(w.ranks);
  std::vector<std::vector<std::int64_t>> rows(ranks, std::vector<std::int64_t>(ranks));
  for (std::size_t d = 0; d < ranks; ++d) {
    for (const Arrival& arrival : place(w, routing, static_cast<int>(d)).arrivals) {
      ++rows[static_cast<std::size_t>(arrival.source)][d];
    }
  }
  return rows;
}

Placement place(const Workload& w, const std::vector<Choices>& routing, int rank) {
  const std::vector<std::int64_t> counts = count_local(w, routing, rank);
  const std::vector<std::int64_t> offsets = zone_offsets(w, counts);
  std::vector<std::int64_t> next = offsets;
  Placement placement;
  for (int source = 0; source < w.ranks; ++source) {
    const Choices& choices = routing[static_cast<std::size_t>(source)];
    for (int token = 0; token < w.tokens; ++token) {
      const int begin = static_cast<int>(placement.rows.size());
      for (int k = 0; k < w.topk; ++k) {
        const int expert =
            choices[static_cast<std::size_t>(token) * static_cast<std::size_t>(w.topk) +
                    static_cast<std::size_t>(k)];
        if (expert / w.local_experts() != rank) continue;
        const auto zone = static_cast<std::size_t>(expert % w.local_experts());
        if (w.layout == Layout::expert) {
          placement.rows.push_back(static_cast<std::int32_t>(next[zone]++));
        } else if (static_cast<int>(placement.rows.size()) == begin) {
          placement.rows.push_back(begin);
        }
      }
      const int end = static_cast<int>(placement.rows.size());
      if (end > begin) placement.arrivals.push_back({source, token, begin, end});
    }
  }
  if (w.layout == Layout::rank) {
    placement.total = static_cast<std::int64_t>(placement.rows.size());
    return placement;
  }
  placement.total = offsets.back();
  for (std::size_t zone = 0; zone < counts.size(); ++zone) {
    for (std::int64_t row = offsets[zone] + counts[zone]; row < offsets[zone + 1]; ++row) {
      placement.padding_rows.push_back(static_cast<std::int32_t>(row));
    }
  }
  return placement;
}

Traffic traffic_of(const Workload& w, const std::vector<Choices>& routing, int rank) {
  const auto me = static_cast<std::size_t>(rank);
  const std::vector<std::int64_t> sent = count_rows(w, routing)[me];
  Traffic traffic;
  traffic.choices = routing[me];
  traffic.recv_rows = place(w, routing, rank).total;
  traffic.recv_capacity =
      std::max<std::int64_t>(round_up(traffic.recv_rows, w.alignment), w.alignment);
  traffic.sent_rows = std::accumulate(sent.begin(), sent.end(), -sent[me]);
  return traffic;
}

}  // namespace bench
