#include "gemm/cost_model.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "gemm/family.h"

namespace xd::gemm {
namespace {

double bytes_of(std::int64_t rows, std::int64_t columns, int element) {
  return static_cast<double>(rows) * static_cast<double>(columns) * element;
}

// The ways of one call, and the sizes that they share.
class Estimate {
 public:
  Estimate(const Machine& machine, const Problem& problem, const Capacity& capacity)
      : m_(machine), p_(problem), capacity_(capacity), peers_(problem.ranks - 1) {
    gather_bytes_ = bytes_of(p_.most_tokens, p_.k, p_.input_bytes);
    share_bytes_ = bytes_of(p_.most_tokens, p_.n, p_.partial_bytes);
    all_bytes_ = bytes_of(p_.tokens, p_.n, p_.partial_bytes);
    whole_ = product(p_.tokens);
  }

  Option split() const;
  Option direct() const;
  Option sequential() const;

 private:
  double product(std::int64_t rows) const { return product_us(m_, rows, p_.n, p_.k, p_); }
  double copy(double bytes) const { return m_.copy_us + bytes / m_.link_bytes_us; }
  double sum(double bytes) const { return m_.sum_us + (p_.ranks + 1) * bytes / m_.sum_bytes_us; }
  bool reduces_all() const { return p_.operation == XD_GEMM_ALL_REDUCE; }
  // After the sum all_reduce also stores rows at all peers, and meets them once more; twice where
  // rows are float32, since half of them wait for the peers' sums.
  double spread() const {
    if (!reduces_all()) return 0;
    const double bytes = share_bytes_ * (capacity_.exact_sums ? 4.0 / p_.partial_bytes : 1);
    return peers_ * bytes / m_.push_bytes_us + (capacity_.exact_sums ? 2 : 1) * m_.meet_us;
  }
  bool fits_words(double bytes) const {
    return capacity_.word_bytes > 0 && bytes <= static_cast<double>(capacity_.word_bytes);
  }
  bool fits_chunks() const {
    return capacity_.chunk_bytes > 0 && share_bytes_ <= static_cast<double>(capacity_.chunk_bytes);
  }

  Option gather(bool doubling) const;
  Option chunks() const;
  Option sequential_gather() const;
  Option copied_sum() const;
  Option worded_sum() const;
  Obstacle direct_obstacle(std::int64_t& pitch) const;

  const Machine& m_;
  const Problem& p_;
  const Capacity& capacity_;
  const int peers_;
  double gather_bytes_ = 0;  // one rank's rows of a
  double share_bytes_ = 0;   // one rank's rows of the partial sums
  double all_bytes_ = 0;     // all rows of them
  double whole_ = 0;         // the product in one piece
};

// Gathers take the faster steps, of equal ones those of one peer.
Option Estimate::split() const {
  if (p_.operation != XD_GEMM_ALL_GATHER) return chunks();
  const Option single = gather(false), doubling = gather(true);
  return single.us <= doubling.us ? single : doubling;
}

// Rows arrive from the peers one after the other, nearest first. `doubling`: one peer's rows, then
// those of one more, two more, four more .. in one product each.
Option Estimate::gather(bool doubling) const {
  Option o{.algo = XD_GEMM_ALGO_SPLIT, .doubles = doubling, .products = 1};
  const double each = copy(gather_bytes_) + m_.flag_us;
  const auto arrival = [&](int peers) { return m_.open_us + m_.first_copy_us + peers * each; };
  const double own = product(p_.most_tokens);
  o.opens_first = peers_ > 0 && own >= m_.blocking_us;
  o.gemm_us = own;
  double now = own;
  for (int done = 0; done < peers_; ++o.products) {
    const int step = doubling ? std::min(done + 1, peers_ - done) : 1;
    done += step;
    const double piece = product(p_.most_tokens * step);
    now = std::max(now, arrival(done)) + m_.wait_us + m_.wait_boundary_us + piece;
    o.gemm_us += piece;
  }
  o.transfer_us = peers_ > 0 ? arrival(peers_) : 0;
  o.us = now + m_.join_us;
  return o;
}

Option Estimate::sequential_gather() const {
  Option o{.algo = XD_GEMM_ALGO_SEQUENTIAL, .products = 1, .gemm_us = whole_};
  const double copies = m_.open_us + m_.first_copy_us +
                        peers_ * (copy(gather_bytes_) + m_.flag_us) + m_.wait_us + m_.join_us;
  o.transfer_us = copies;
  const auto consider = [&](Mover mover, double us) {
    if (us >= o.transfer_us) return;
    o.mover = mover;
    o.transfer_us = us;
  };
  // Kernels gather rows of tokens alone.
  if (p_.rows_of_tokens && p_.rows_alone) {
    consider(Mover::push, m_.push_us + peers_ * gather_bytes_ / m_.push_bytes_us);
    if (gather_bytes_ <= static_cast<double>(capacity_.gather_word_bytes)) {
      consider(Mover::inline_flags,
               m_.gather_inline_us + peers_ * gather_bytes_ / m_.words_bytes_us);
    }
  }
  o.us = o.transfer_us + whole_;
  return o;
}

// Products of the peers' rows, each copied while the next is computed; the own rows last.
Option Estimate::chunks() const {
  Option o{.algo = XD_GEMM_ALGO_SPLIT, .products = p_.ranks};
  if (!p_.rows_of_tokens) {
    o.obstacle = Obstacle::transposed;
    return o;
  }
  if (!fits_chunks()) {
    o.obstacle = Obstacle::no_room;
    return o;
  }
  const double piece = product(p_.most_tokens);
  double now = 0, copied = 0;
  for (int i = 0; i < peers_; ++i) {
    now += piece + (i > 0 ? m_.boundary_us : 0);
    copied = std::max(copied, now + (i == 0 ? m_.first_copy_us : 0)) + copy(share_bytes_);
  }
  now += piece + (peers_ > 0 ? m_.boundary_us : 0);
  o.gemm_us = p_.ranks * piece;
  o.transfer_us = m_.first_copy_us + peers_ * copy(share_bytes_);
  o.us = std::max(now, copied) + m_.meet_us + sum(share_bytes_) + spread();
  return o;
}

Obstacle Estimate::direct_obstacle(std::int64_t& pitch) const {
  if (capacity_.cell_unit == 0) return Obstacle::no_cells;
  if (!p_.stores_terms) return Obstacle::rounded;
  if (!p_.equal_shares) return Obstacle::uneven_shares;
  if (share_bytes_ > static_cast<double>(capacity_.cell_bytes)) return Obstacle::cell_too_small;
  // Rows that lie apart fill more of a cell than their elements do.
  pitch =
      cell_pitch(p_.most_tokens, p_.n, p_.partial_bytes, capacity_.cell_unit, capacity_.cell_bytes);
  return pitch == 0 ? Obstacle::no_pitch : Obstacle::none;
}

// One product whose rows go to their owners, and then a sum.
Option Estimate::direct() const {
  Option o{.algo = XD_GEMM_ALGO_DIRECT, .mover = Mover::product, .products = 1};
  o.obstacle =
      p_.operation == XD_GEMM_REDUCE_SCATTER ? direct_obstacle(o.pitch) : Obstacle::not_for_this;
  if (o.obstacle != Obstacle::none) return o;
  const double link = peers_ * share_bytes_ / m_.link_bytes_us;
  o.gemm_us = whole_;
  if (p_.peer_store_times.count > 0) {
    o.gemm_us = p_.peer_store_times.us(p_.tokens);
    o.transfer_us = link;
    o.us = o.gemm_us + m_.peer_store_us + m_.meet_us + sum(share_bytes_);
    return o;
  }
  const double loss =
      m_.stitched_loss *
      std::max(m_.stitched_columns / static_cast<double>(std::max<std::int64_t>(p_.n, 1)), 0.25);
  o.transfer_us = link;
  o.us = std::max(whole_ + loss * link, m_.stitched_least * link) + m_.meet_us + sum(share_bytes_);
  return o;
}

Option Estimate::copied_sum() const {
  Option o{.algo = XD_GEMM_ALGO_SEQUENTIAL, .products = 1, .gemm_us = whole_};
  if (!fits_chunks()) {
    o.obstacle = Obstacle::no_room;
    return o;
  }
  o.transfer_us = m_.first_copy_us + peers_ * copy(share_bytes_);
  // The own rows are copied as well, into a cell of this device.
  const double own = 2 * share_bytes_ / m_.memory_bytes_us;
  o.us = whole_ + o.transfer_us + own + m_.join_us + m_.meet_us + sum(share_bytes_) + spread();
  return o;
}

Option Estimate::worded_sum() const {
  Option o{.algo = XD_GEMM_ALGO_SEQUENTIAL,
           .mover = Mover::inline_flags,
           .products = 1,
           .gemm_us = whole_};
  if (!fits_words(share_bytes_)) {
    o.obstacle = Obstacle::no_room;
    return o;
  }
  if (reduces_all()) {
    const double one = m_.one_shot_us + peers_ * all_bytes_ / m_.one_shot_bytes_us;
    const double two = m_.two_shot_us + 2 * peers_ * share_bytes_ / m_.two_shot_bytes_us;
    const bool one_shot = (one < two || !capacity_.two_steps) && fits_words(all_bytes_);
    if (!one_shot && !capacity_.two_steps) o.obstacle = Obstacle::no_room;
    o.mover = one_shot ? Mover::one_shot : Mover::inline_flags;
    o.transfer_us = one_shot ? one : two;
  } else {
    o.transfer_us = m_.inline_flags_us + peers_ * share_bytes_ / m_.words_bytes_us;
  }
  o.us = whole_ + o.transfer_us;
  return o;
}

Option Estimate::sequential() const {
  if (p_.operation == XD_GEMM_ALL_GATHER) return sequential_gather();
  const Option words = worded_sum(), copies = copied_sum();
  if (words.obstacle != Obstacle::none) return copies;
  if (copies.obstacle != Obstacle::none) return words;
  return words.us <= copies.us ? words : copies;
}

std::string microseconds(double us) {
  char text[32];
  std::snprintf(text, sizeof(text), us < 100 ? "%.1f us" : "%.0f us", us);
  return text;
}

}  // namespace

const char* name_of(Mover mover) {
  switch (mover) {
    case Mover::copies:
      return "copy engine";
    case Mover::push:
      return "push kernel";
    case Mover::inline_flags:
      return "words";
    case Mover::one_shot:
      return "words, one step";
    case Mover::product:
      return "stores of the product";
  }
  return "";
}

double ProductTimes::us(std::int64_t rows) const {
  const auto* const end = of.data() + count;
  const auto* const next =
      std::find_if(of.data(), end, [&](const Time& time) { return time.rows >= rows; });
  if (next == of.data()) return next->us;
  const Time& before = *(next - 1);
  if (next == end) return before.us * static_cast<double>(rows) / static_cast<double>(before.rows);
  const double part =
      static_cast<double>(rows - before.rows) / static_cast<double>(next->rows - before.rows);
  return before.us + part * (next->us - before.us);
}

double product_us(const Machine& machine, std::int64_t m, std::int64_t n, std::int64_t k,
                  const Problem& problem) {
  if (m == 0 || n == 0) return 0;
  if (problem.times.count > 0) return problem.times.us(m);
  const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) *
                       (static_cast<double>(k) + machine.extra_k);
  const double bytes = bytes_of(m, k, problem.input_bytes) + bytes_of(n, k, problem.input_bytes) +
                       bytes_of(m, n, problem.partial_bytes);
  return std::max(machine.product_us + flops / (machine.flops_us * problem.speed),
                  machine.memory_us + bytes / machine.memory_bytes_us);
}

std::int64_t cell_pitch(std::int64_t rows, std::int64_t columns, int element_bytes,
                        std::uint64_t unit, std::uint64_t most_bytes) {
  if (rows <= 0 || columns <= 0 || unit == 0) return 0;
  const auto row_bytes = static_cast<std::uint64_t>(columns * element_bytes);
  // rows * pitch is a multiple of the unit, and pitch one of 16 bytes.
  std::uint64_t a = unit, b = static_cast<std::uint64_t>(rows);
  while (b != 0) a = std::exchange(b, a % b);
  std::uint64_t step = unit / a;
  while (step % 16 != 0) step *= 2;
  const std::uint64_t pitch = round_up(row_bytes, step);
  if (pitch * static_cast<std::uint64_t>(rows) > most_bytes) return 0;
  return static_cast<std::int64_t>(pitch / static_cast<std::uint64_t>(element_bytes));
}

const Option* Options::find(xd_gemm_algo algo) const {
  for (int i = 0; i < count; ++i) {
    if (option[at(i)].algo == algo) return &option[at(i)];
  }
  return nullptr;
}

const Option* Options::best() const {
  const Option* best = nullptr;
  for (int i = 0; i < count; ++i) {
    const Option& o = option[at(i)];
    if (o.obstacle == Obstacle::none && (best == nullptr || o.us < best->us)) best = &o;
  }
  return best;
}

Options options_of(const Machine& machine, const Problem& problem, const Capacity& capacity) {
  const Estimate estimate(machine, problem, capacity);
  Options all;
  const auto add = [&](const Option& option) { all.option[at(all.count++)] = option; };
  // SEQUENTIAL comes first: among equals it is taken, since it does least.
  add(estimate.sequential());
  add(estimate.direct());
  add(estimate.split());
  return all;
}

std::string text_of(Obstacle obstacle, const Problem& problem, const Capacity& capacity) {
  const auto share = problem.most_tokens * problem.n * problem.partial_bytes;
  switch (obstacle) {
    case Obstacle::none:
      return "";
    case Obstacle::not_for_this:
      return "only reduce_scatter has it";
    case Obstacle::uneven_shares:
      return "needs the same number of tokens on all ranks, since the owners' cells are equal";
    case Obstacle::no_cells:
      return "this context has no cells that a product can store into";
    case Obstacle::cell_too_small:
      return concat("needs cells of ", share, " bytes, this context has cells of ",
                    capacity.cell_bytes);
    case Obstacle::no_pitch:
      return concat("needs rows of a rank that fill whole units of ", capacity.cell_unit,
                    " bytes, ", problem.most_tokens, " rows of ", problem.n * problem.partial_bytes,
                    " bytes do not");
    case Obstacle::rounded:
      return "needs products that come in the type of d, or float32: others are rounded first";
    case Obstacle::transposed:
      return "needs a with rows of tokens (transpose_a = 0)";
    case Obstacle::no_room:
      if (capacity.chunk_bytes == 0 && at(share) <= capacity.word_bytes) {
        return "partial sums of this call travel as words";
      }
      return concat("needs room for ", share,
                    " bytes of partial sums from a rank, this context has ",
                    std::max(capacity.chunk_bytes, capacity.word_bytes));
  }
  return "";
}

std::string text_of(const Options& options, const Problem& problem, const Capacity& capacity) {
  std::string text;
  for (int i = 0; i < options.count; ++i) {
    const Option& o = options.option[at(i)];
    text += concat(algo_name(o.algo), ": ");
    if (o.obstacle != Obstacle::none) {
      text += concat(text_of(o.obstacle, problem, capacity), "\n");
      continue;
    }
    text += concat(microseconds(o.us), " (product ", microseconds(o.gemm_us), " in ", o.products,
                   ", transfer ", microseconds(o.transfer_us), " by ", name_of(o.mover), ")\n");
  }
  return text;
}

}  // namespace xd::gemm
