// The example of docs/ep-semantics.md: two ranks, four experts, top-2, every number by the library.
//   crossdock-run -n 2 --threads --no-prefix -- worked-example
#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "docs/sections.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr int kTopk = 2, kHidden = 4, kExperts = 4, kLocal = 2, kMaxTokens = 3;
constexpr int kRows = 7;  // one more than the zones need, to show that it stays as it is
constexpr float kUntouched = -1;

// The batch of one rank. Token t of rank r is the row 100 (r + 1) + 10 t + {0, 1, 2, 3}.
struct Batch {
  int rank;
  std::vector<std::int32_t> topk_idx;
  std::vector<float> topk_weights;

  int tokens() const { return static_cast<int>(topk_idx.size()) / kTopk; }
  std::vector<float> rows() const {
    std::vector<float> rows;
    for (int t = 0; t < tokens(); ++t) {
      for (int h = 0; h < kHidden; ++h) {
        rows.push_back(static_cast<float>(100 * (rank + 1) + 10 * t + h));
      }
    }
    return rows;
  }
};

Batch good_batch(int rank) {
  if (rank == 0) return {0, {0, 2, 1, 0, 3, -1}, {0.75f, 0.25f, 0.5f, 0.5f, 1, 0}};
  return {1, {2, 0, 3, 2}, {0.5f, 0.5f, 0.25f, 0.75f}};
}

// On rank 1: expert 4 does not exist, and expert 3 is named twice by one token.
Batch bad_batch(int rank) {
  Batch batch = good_batch(rank);
  if (rank == 1) batch.topk_idx = {2, 4, 3, 3};
  return batch;
}

// A table of tensors side by side, one line per row.
class Table {
 public:
  template <class T>
  Table& add(const std::string& name, const std::vector<T>& values, int columns) {
    std::vector<std::string> column{name};
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::ostringstream cell;
      cell << values[i];
      if (i % static_cast<std::size_t>(columns) == 0) {
        column.push_back(cell.str());
      } else {
        column.back() += " " + cell.str();
      }
    }
    return add(std::move(column));
  }

  Table& add(std::vector<std::string> column) {
    std::size_t width = 0;
    for (const std::string& cell : column) width = std::max(width, cell.size());
    lines_.resize(std::max(lines_.size(), column.size()));
    for (std::size_t i = 0; i < column.size(); ++i) {
      column[i].resize(width + 3, ' ');
      lines_[i] += column[i];
    }
    return *this;
  }

  void show(Sections& out, const std::string& who) const {
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      const std::string number = i == 0 ? "row" : std::to_string(i - 1) + "  ";
      std::string line = (i == 0 ? who : std::string(who.size(), ' ')) + "  " + number + "  ";
      line += lines_[i];
      out.line(line.substr(0, line.find_last_not_of(' ') + 1));
    }
  }

 private:
  std::vector<std::string> lines_;
};

// The origin of each row of recv_tokens, told by its first element.
std::vector<std::string> origins(const std::vector<float>& rows) {
  std::vector<std::string> column{"it is"};
  for (std::size_t i = 0; i < rows.size(); i += kHidden) {
    const int value = static_cast<int>(rows[i]);
    std::string text = value == 0 ? "padding" : "untouched";
    if (value > 0) {
      text =
          "rank " + std::to_string(value / 100 - 1) + " token " + std::to_string(value % 100 / 10);
    }
    column.push_back(text);
  }
  return column;
}

template <class T>
std::string list(const std::string& name, const std::vector<T>& values) {
  std::ostringstream text;
  text << name;
  for (const T& value : values) text << ' ' << value;
  return text.str();
}

// One group and one batch on it, with what the operations need and leave.
class Example {
 public:
  Example(Rank& rank, Batch batch, xd_ep_config config, Sections& out)
      : rank_(rank), batch_(std::move(batch)), out_(out), layout_(config.layout) {
    config.num_ranks = 2;
    config.num_experts = kExperts;
    config.max_topk = kTopk;
    config.max_tokens_per_rank = kMaxTokens;
    config.hidden = kHidden;
    config.dtype = kF32;
    config.alignment = 2;
    group_ = make_group(rank.comm, config);
    plan_ = make_plan(rank, config);
  }

  xd_status prepare() {
    topk_idx_.write(batch_.topk_idx);
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx_.dl();
    set_plan(args, plan_);
    args.counts = counts_.dl();
    args.padded_counts = padded_.dl();
    args.offsets = offsets_.dl();
    args.total = total_.dl();
    args.rank_rows = rank_rows_.dl();
    return xd_ep_prepare(group_.get(), &args, nullptr);
  }

  void show_inputs() {
    Table()
        .add("tokens", batch_.rows(), kHidden)
        .add("topk_idx", batch_.topk_idx, kTopk)
        .add("topk_weights", batch_.topk_weights, kTopk)
        .show(out_, who());
  }

  void show_counts() {
    const auto numbers = [](const Tensor& t) { return t.read_as<std::int32_t>(); };
    out_.line(who() + list("  counts", numbers(counts_)) + list("   padded", numbers(padded_)) +
              list("   offsets", numbers(offsets_)) + list("   total", numbers(total_)));
    const std::vector<std::int32_t> rows = numbers(rank_rows_);
    const int r = rank_.rank;
    out_.line("        rows sent to rank 0: " + std::to_string(rows[at(2 * r)]) +
              "   to rank 1: " + std::to_string(rows[at(2 * r + 1)]));
  }

  void dispatch() {
    tokens_.write(batch_.rows());
    weights_.write(batch_.topk_weights);
    recv_tokens_.write(std::vector<float>(std::size_t{kRows} * kHidden, kUntouched));
    recv_weights_.write(std::vector<float>(at(kRows * weights_per_row()), kUntouched));
    xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
    set_plan(args, plan_);
    args.tokens = tokens_.dl();
    args.topk_weights = weights_.dl();
    args.recv_tokens = recv_tokens_.dl();
    args.recv_weights = recv_weights_.dl();
    if (layout_ == XD_EP_RANK_MAJOR) args.recv_topk_idx = recv_topk_idx_.dl();
    ok(xd_ep_dispatch(group_.get(), &args, nullptr));
  }

  void show_received() {
    const std::vector<float> rows = recv_tokens_.read_as<float>();
    Table table;
    table.add("recv_tokens", rows, kHidden);
    table.add("recv_weights", recv_weights_.read_as<float>(), weights_per_row());
    if (layout_ == XD_EP_RANK_MAJOR) {
      table.add("recv_topk_idx", recv_topk_idx_.read_as<std::int32_t>(), kTopk);
    }
    table.add(origins(rows)).show(out_, who());
  }

  // Expert e multiplies by e + 1. In RANK_MAJOR the caller weights and sums per row.
  void run_experts() { expert_out_.write(times_experts(recv_tokens_.read_as<float>())); }

  void combine() {
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    set_plan(args, plan_);
    args.expert_out = expert_out_.dl();
    if (layout_ == XD_EP_EXPERT_MAJOR) args.weights = recv_weights_.dl();
    args.out = out_tokens_.dl();
    ok(xd_ep_combine(group_.get(), &args, nullptr));
  }

  void show_combined() {
    Table()
        .add("expert_out", expert_out_.read_as<float>(), kHidden)
        .add("out", out_tokens_.read_as<float>(), kHidden)
        .show(out_, who());
  }

  // grad_out is 1 everywhere.
  void backward() {
    grad_out_.write(std::vector<float>(at(batch_.tokens() * kHidden), 1));
    xd_ep_combine_bwd_args combine = XD_EP_COMBINE_BWD_ARGS_INIT;
    set_plan(combine, plan_);
    combine.grad_out = grad_out_.dl();
    combine.expert_out = expert_out_.dl();
    combine.weights = recv_weights_.dl();
    combine.grad_expert_out =
        grad_rows_.write(std::vector<float>(std::size_t{kRows} * kHidden, kUntouched)).dl();
    combine.grad_weights = grad_weights_.write(std::vector<float>(kRows, kUntouched)).dl();
    ok(xd_ep_combine_bwd(group_.get(), &combine, nullptr));
    const std::vector<float> rows = grad_rows_.read_as<float>();
    Table table;
    table.add("grad_expert_out", rows, kHidden);
    table.add("grad_weights", grad_weights_.read_as<float>(), 1);
    grad_rows_.write(times_experts(rows));
    xd_ep_dispatch_bwd_args dispatch = XD_EP_DISPATCH_BWD_ARGS_INIT;
    set_plan(dispatch, plan_);
    dispatch.grad_recv_tokens = grad_rows_.dl();
    dispatch.grad_recv_weights = grad_weights_.dl();
    dispatch.grad_tokens = out_tokens_.dl();
    dispatch.grad_topk_weights = grad_topk_weights_.dl();
    ok(xd_ep_dispatch_bwd(group_.get(), &dispatch, nullptr));
    table.add("grad_tokens", out_tokens_.read_as<float>(), kHidden);
    table.add("grad_topk_weights", grad_topk_weights_.read_as<float>(), kTopk).show(out_, who());
  }

  // Shows the error that prepare has returned, and the group's counts.
  void show_status() {
    xd_ep_status returned = XD_EP_STATUS_INIT;
    ok(xd_ep_last_error(&returned));
    const xd_ep_status counted = group_status(group_.get());
    out_.line(who() + "  " + xd_status_name(returned.status) + "   bad_ids " +
              std::to_string(counted.bad_ids) + "   dropped_rows " +
              std::to_string(counted.dropped_rows));
    if (returned.text[0] != '\0') out_.line(std::string("        ") + returned.text);
  }

 private:
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  int weights_per_row() const { return layout_ == XD_EP_EXPERT_MAJOR ? 1 : kTopk; }
  std::string who() const { return "rank " + std::to_string(rank_.rank); }

  std::vector<float> times_experts(std::vector<float> rows) const {
    for (int i = 0; i < kRows * kHidden; ++i) rows[at(i)] *= factor(i / kHidden);
    return rows;
  }

  // The factor by which the caller's experts multiply receive row r.
  float factor(int r) const {
    const auto expert_factor = [&](int local) {
      return static_cast<float>(rank_.rank * kLocal + local + 1);
    };
    if (layout_ == XD_EP_EXPERT_MAJOR) {
      const auto offsets = offsets_.read_as<std::int32_t>();
      return r >= offsets[2] ? 1 : expert_factor(r < offsets[1] ? 0 : 1);
    }
    const auto idx = recv_topk_idx_.read_as<std::int32_t>();
    const auto weights = recv_weights_.read_as<float>();
    if (idx[at(r * kTopk)] < 0 && idx[at(r * kTopk + 1)] < 0) return 1;
    float sum = 0;
    for (int i = r * kTopk; i < (r + 1) * kTopk; ++i) {
      if (idx[at(i)] >= 0) sum += weights[at(i)] * expert_factor(idx[at(i)]);
    }
    return sum;
  }

  Rank& rank_;
  Batch batch_;
  Sections& out_;
  xd_ep_layout layout_;
  Group group_;
  Buffer plan_;
  Tensor topk_idx_{rank_, kI32, {batch_.tokens(), kTopk}};
  Tensor weights_{rank_, kF32, {batch_.tokens(), kTopk}};
  Tensor tokens_{rank_, kF32, {batch_.tokens(), kHidden}};
  Tensor counts_{rank_, kI32, {kLocal}}, padded_{rank_, kI32, {kLocal}};
  Tensor offsets_{rank_, kI32, {kLocal + 1}}, total_{rank_, kI32, {1}};
  Tensor rank_rows_{rank_, kI32, {2, 2}};
  Tensor recv_tokens_{rank_, kF32, {kRows, kHidden}, Place::symmetric};
  Tensor recv_weights_ = layout_ == XD_EP_EXPERT_MAJOR ? Tensor(rank_, kF32, {kRows})
                                                       : Tensor(rank_, kF32, {kRows, kTopk});
  Tensor recv_topk_idx_{rank_, kI32, {kRows, kTopk}};
  Tensor expert_out_{rank_, kF32, {kRows, kHidden}, Place::symmetric};
  Tensor out_tokens_{rank_, kF32, {batch_.tokens(), kHidden}};
  Tensor grad_out_{rank_, kF32, {batch_.tokens(), kHidden}};
  Tensor grad_rows_{rank_, kF32, {kRows, kHidden}};
  Tensor grad_weights_{rank_, kF32, {kRows}};
  Tensor grad_topk_weights_{rank_, kF32, {batch_.tokens(), kTopk}};
};

void expert_major(Rank& rank, Sections& out) {
  Example example(rank, good_batch(rank.rank), XD_EP_CONFIG_INIT, out);
  out.begin("inputs");
  example.show_inputs();
  out.begin("expert-major-prepare");
  ok(example.prepare());
  example.show_counts();
  out.begin("expert-major-dispatch");
  example.dispatch();
  example.show_received();
  out.begin("expert-major-combine");
  example.run_experts();
  example.combine();
  example.show_combined();
  out.begin("expert-major-backward");
  example.backward();
}

void rank_major(Rank& rank, Sections& out) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.layout = XD_EP_RANK_MAJOR;
  Example example(rank, good_batch(rank.rank), config, out);
  out.begin("rank-major-prepare");
  ok(example.prepare());
  example.show_counts();
  out.begin("rank-major-dispatch");
  example.dispatch();
  example.show_received();
  out.begin("rank-major-combine");
  example.run_experts();
  example.combine();
  example.show_combined();
}

void drop(Rank& rank, Sections& out) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.overflow = XD_EP_OVERFLOW_DROP;
  config.recv_capacity = rank.rank == 0 ? 2 : 6;
  Example example(rank, good_batch(rank.rank), config, out);
  out.begin("drop");
  ok(example.prepare());
  example.show_counts();
  example.show_status();
  example.dispatch();
  example.show_received();
  example.run_experts();
  example.combine();
  example.show_combined();
}

void expect(xd_status expected, xd_status got) {
  if (got != expected) {
    throw std::runtime_error(std::string(xd_status_name(got)) + ", expected " +
                             xd_status_name(expected));
  }
}

void overflow(Rank& rank, Sections& out) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.recv_capacity = rank.rank == 0 ? 2 : 6;
  Example example(rank, good_batch(rank.rank), config, out);
  out.begin("overflow");
  expect(XD_ERROR_OVERFLOW, example.prepare());
  example.show_counts();
  example.show_status();
}

void bad_ids(Rank& rank, Sections& out) {
  Example example(rank, bad_batch(rank.rank), XD_EP_CONFIG_INIT, out);
  out.begin("bad-ids");
  expect(XD_ERROR_INVALID_ARGUMENT, example.prepare());
  example.show_counts();
  example.show_status();
}

}  // namespace
}  // namespace xd::test

int main() {
  return xd::test::run_sections([](xd::test::Rank& rank, xd::test::Sections& out) {
    for (const auto step : {xd::test::expert_major, xd::test::rank_major, xd::test::drop,
                            xd::test::overflow, xd::test::bad_ids}) {
      step(rank, out);
    }
  });
}
