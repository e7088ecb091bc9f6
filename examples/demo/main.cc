// Crossdock's demo: trains a small mixture-of-experts layer on the bytes of a text, its experts
// spread over the ranks, and checks the first and the last step against one rank doing it all.
//
//   crossdock-run -n 4 --no-prefix -- crossdock-demo [--text FILE] [--steps N]
//
// Exit code 0 if every check is right, 1 if one is wrong, 2 after a usage error.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>

#include "check.h"
#include "screen.h"
#include "worker.h"

namespace {

using namespace demo;

struct Options {
  std::string text;
  int steps = 60;
};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    if (i + 1 == arguments.size()) throw std::invalid_argument(arguments[i] + " needs a value");
    if (arguments[i] == "--text") {
      options.text = arguments[i + 1];
    } else if (arguments[i] == "--steps") {
      options.steps = std::atoi(arguments[i + 1].c_str());
      if (options.steps < 1 || options.steps > 100000) {
        throw std::invalid_argument("--steps " + arguments[i + 1] + ": expected 1 to 100000");
      }
    } else {
      throw std::invalid_argument("unknown option '" + arguments[i] + "'");
    }
  }
  return options;
}

template <class... Values>
std::string format(const char* pattern, Values... values) {
  char text[256];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

double loss_of(const Worker& worker, int step) {
  double sum = 0;
  for (int rank = 0; rank < worker.sizes.ranks; ++rank) {
    sum += worker.loss.of(rank)[static_cast<std::size_t>(step)];
  }
  return sum;
}

void print_start(const Screen& screen, const Sizes& s, const Text& text) {
  screen.heading(format("Crossdock demo: a mixture-of-experts layer over %d ranks", s.ranks));
  std::printf("  text   %s, %zu bytes: predict the next one\n", text.path.c_str(),
              text.bytes.size());
  std::printf("  layer  hidden %d, %d experts of %d, %d per token; %d tokens per rank and step\n\n",
              s.hidden, s.experts, s.inner, s.topk, s.tokens);
}

void print_balance(const Screen& screen, const Sizes& s, const std::vector<std::int64_t>& rows) {
  screen.heading("Rows per expert, all steps");
  const auto total =
      static_cast<double>(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}));
  std::vector<Screen::Bar> bars;
  for (std::size_t e = 0; e < rows.size(); ++e) {
    const auto share = static_cast<double>(rows[e]) / total;
    bars.push_back({format("expert %2zu on rank %zu", e, e / std::size_t(s.local_experts())), share,
                    format("%4.1f %%", 100 * share)});
  }
  screen.bars(bars);
}

void print_times(const Screen& screen, const Worker& worker, int steps) {
  screen.heading("Time per step: median over steps of the slowest rank");
  std::vector<Screen::Bar> bars;
  for (std::size_t phase = 0; phase < kPhases.size(); ++phase) {
    std::vector<double> slowest(static_cast<std::size_t>(steps));
    for (int rank = 0; rank < worker.sizes.ranks; ++rank) {
      const auto seconds = worker.seconds.of(rank);
      for (std::size_t step = 0; step < slowest.size(); ++step) {
        slowest[step] = std::max(slowest[step], seconds[step * kPhases.size() + phase]);
      }
    }
    std::nth_element(slowest.begin(), slowest.begin() + steps / 2, slowest.end());
    const double median = slowest[slowest.size() / 2];
    bars.push_back({kPhases[phase], median, format("%8.3f ms", median * 1e3)});
  }
  screen.bars(bars);
}

// Returns whether all of it is right.
bool print_check(const Screen& screen, int step, const std::vector<Comparison>& comparisons) {
  screen.heading(format("Check of step %d against one rank that computes everything", step + 1));
  std::printf("  %-20s %12s %12s\n", "", "difference", "allowed");
  bool right = true;
  for (const Comparison& c : comparisons) {
    std::printf("  %-20s %12.2e %12.2e  %s\n", c.what.c_str(), c.error, c.allowed,
                screen.verdict(c.right()).c_str());
    right = right && c.right();
  }
  return right;
}

// What rank 0 sees of the training as it goes on, and tells at the end.
class Report {
 public:
  Report(const Worker& worker, const Text& text, int steps)
      : worker_(worker),
        text_(text),
        steps_(steps),
        rows_(static_cast<std::size_t>(worker.sizes.experts)) {
    print_start(screen_, worker_.sizes, text_);
  }

  // After all ranks have run the step, before any of them goes on.
  void observe(int step) {
    auto expert = rows_.begin();
    for (int rank = 0; rank < worker_.sizes.ranks; ++rank) {
      for (const std::int32_t count : worker_.counts.of(rank)) *expert++ += count;
    }
    screen_.progress(step + 1, steps_,
                     format("step %d/%d  loss %.3f", step + 1, steps_, loss_of(worker_, step)));
    if (step == 0) first_ = check_step(worker_, text_, step);
    if (step == steps_ - 1) last_ = check_step(worker_, text_, step);
  }

  bool finish() {
    screen_.finish_progress(format("  %d steps: loss %.3f -> %.3f", steps_, loss_of(worker_, 0),
                                   loss_of(worker_, steps_ - 1)));
    print_balance(screen_, worker_.sizes, rows_);
    print_times(screen_, worker_, steps_);
    const bool first = print_check(screen_, 0, first_);
    const bool last = print_check(screen_, steps_ - 1, last_);
    std::printf("\n%s\n", first && last ? "All right." : "The check FAILED.");
    return first && last;
  }

 private:
  Screen screen_;
  const Worker& worker_;
  const Text& text_;
  const int steps_;
  std::vector<std::int64_t> rows_;
  std::vector<Comparison> first_, last_;
};

// oneDNN computes with OpenMP's threads; here the ranks are what runs in parallel. Looked up, as
// the compiler at hand may come with another OpenMP than the one that oneDNN was built with.
void use_one_thread() {
  void* const set = ::dlsym(RTLD_DEFAULT, "omp_set_num_threads");
  if (set != nullptr) reinterpret_cast<void (*)(int)>(set)(1);
}

int run(const Options& options) {
  use_one_thread();
  const char* const ranks = std::getenv("WORLD_SIZE");
  if (ranks == nullptr) throw std::invalid_argument("start it with crossdock-run -n 4 --no-prefix");
  const Text text = read_text(options.text);
  Sizes sizes;
  sizes.ranks = std::atoi(ranks);
  if (sizes.ranks < 1 || sizes.experts % sizes.ranks != 0) {
    throw std::invalid_argument(format("%d ranks: expected a divisor of %d, the number of experts",
                                       sizes.ranks, sizes.experts));
  }
  Exchange exchange(sizes, Worker::heap_bytes(sizes, options.steps));
  Worker worker(exchange, text, options.steps);
  std::unique_ptr<Report> report;
  if (exchange.rank() == 0) report = std::make_unique<Report>(worker, text, options.steps);
  for (int step = 0; step < options.steps; ++step) {
    worker.run(step);
    exchange.barrier();
    if (report) report->observe(step);
    worker.update(step);
  }
  const bool right = !report || report->finish();
  exchange.barrier();  // rank 0 reads the others' memory until here
  return right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse({argv + 1, argv + argc}));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "crossdock-demo: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-demo: %s\n", error.what());
    return 1;
  }
}
