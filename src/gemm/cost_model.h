// The time of an operation on CUDA devices by each way of doing it, and so the choice of AUTO
// there: a pure function of what all ranks know alike, so that all of them choose the same way
// without asking one another. (On the CPU gemm/cpu/plan.cc chooses.)
//
// Numbers are microseconds. They were fitted to measurements with the products of cuBLASLt, on H200
// and, where few rows travel, on two H100, and reproduce them to about a tenth.
#pragma once

#include <crossdock/gemm.h>

#include <array>
#include <cstdint>
#include <string>

namespace xd::gemm {

// A machine's speeds. Bytes per microsecond are megabytes per second.
struct Machine {
  double flops_us = 795e6;         // of a product of bf16 or fp16, once it runs
  double product_us = 6;           // of every product, beside its arithmetic
  double extra_k = 64;             // columns of K that a tile's beginning and end take
  double memory_bytes_us = 3.6e6;  // bytes that a small product reads and writes in one microsecond
  double memory_us = 2;            // of every product that is bound by memory
  double link_bytes_us = 393e3;    // a copy engine's, to one peer
  double copy_us = 4;              // of every copy
  double open_us = 7;              // until copies may begin, if nothing hides it
  double first_copy_us = 4;        // of the first copy on a stream, in addition
  double blocking_us = 150;        // products from here on keep an opening that comes later waiting
  double flag_us = 1.5;            // of the copy of a flag behind rows
  double wait_us = 1.5;            // of a kernel that finds its flags raised
  double boundary_us = 1;          // between two products
  double wait_boundary_us = 3;     // between two products with a wait between
  double join_us = 1;              // two streams become one
  double meet_us = 9;              // all ranks tell one another that they are done
  double peer_store_us = 8;        // behind a product that has stored far away, until it is there
  double sum_us = 3;               // of a sum, beside its traffic
  double sum_bytes_us = 3.9e6;
  double push_us = 10.5;  // rows pushed by a kernel, and waited for
  double push_bytes_us = 310e3;
  double gather_inline_us = 8.5;  // rows pushed as words, and taken
  double inline_flags_us = 9.5;   // partial sums pushed as words, and summed
  double words_bytes_us = 250e3;
  double one_shot_us = 7.4;  // all_reduce by words in one step, where each rank sums everything
  double one_shot_bytes_us = 190e3;
  double two_shot_us = 11;  // all_reduce by words in two steps
  double two_shot_bytes_us = 340e3;
  // A product whose rows go straight to their owners loses this part of the link's time, in rows of
  // `stitched_columns`. Narrower ones lose more.
  double stitched_loss = 0.35;
  double stitched_columns = 8192;
  double stitched_least = 2;  // and takes so many times the link's time at least
};

// How the bytes of an algorithm move.
enum class Mover : std::uint8_t {
  copies,        // the copy engine, beside products or between
  push,          // a kernel that stores rows, and raises one flag behind them
  inline_flags,  // a kernel that stores words which need no flag
  one_shot,      // all_reduce: words of everything to everybody
  product,       // the product's own stores
};
const char* name_of(Mover mover);

// Measured times of products with the same columns, by ascending rows.
struct ProductTimes {
  struct Time {
    std::int64_t rows;
    double us;
  };
  std::array<Time, 24> of{};
  int count = 0;

  // Between them in proportion, and above them, too. There must be one.
  double us(std::int64_t rows) const;
};

// A call, as far as all ranks know it.
struct Problem {
  xd_gemm_operation operation = XD_GEMM_ALL_GATHER;
  int ranks = 1;
  std::int64_t tokens = 0;       // of all ranks
  std::int64_t most_tokens = 0;  // of the rank that has most
  bool equal_shares = true;      // all ranks have the same number
  std::int64_t n = 0, k = 0;
  int input_bytes = 2;         // of an element of a and b
  int partial_bytes = 2;       // of an element of a product that is summed over ranks
  double speed = 1;            // of the product's arithmetic, 1 = bf16
  bool rows_of_tokens = true;  // a's rows are tokens, so that a part of them is rows of a
  bool rows_alone = true;      // nothing goes with them, such as scales
  bool stores_terms = true;    // products come as they are summed, and are not rounded behind that
  ProductTimes times{};        // of its product; where there are none they are estimated
  ProductTimes
      peer_store_times{};  // likewise of one that stores its rows into their owners' memory
};

// The memory that a context has for each way of transfer.
struct Capacity {
  std::uint64_t cell_bytes = 0;         // stitched: of the cell of one source at one owner
  std::uint64_t cell_unit = 0;          // cells begin at multiples of it, 0 = there are none
  std::uint64_t word_bytes = 0;         // partial sums as words from one source
  std::uint64_t gather_word_bytes = 0;  // likewise rows
  std::uint64_t chunk_bytes = 0;        // partial sums from one source; 0 = there is no such memory
  bool two_steps = true;                // all_reduce: sums may travel as they are stored
  bool exact_sums = false;              // all_reduce by copies: they travel as float32
};

// Why an algorithm cannot run.
enum class Obstacle : std::uint8_t {
  none,
  not_for_this,    // the operation has no such algorithm
  uneven_shares,   // the owners' cells are of one size
  no_cells,        // the context has none
  cell_too_small,  // a rank's rows do not fit into a cell
  no_pitch,        // no pitch makes a rank's rows fill a cell
  rounded,         // the product's stores are not the terms yet
  transposed,      // parts of a are not rows
  no_room,         // neither words nor rows of partial sums have a place
};

struct Option {
  xd_gemm_algo algo = XD_GEMM_ALGO_AUTO;
  Mover mover = Mover::copies;
  Obstacle obstacle = Obstacle::none;
  bool doubles = false;      // SPLIT gathers: each step has the rows of twice as many ranks
  bool opens_first = false;  // SPLIT gathers: the opening goes onto the device before a product
  int products = 0;
  std::int64_t pitch = 0;  // of DIRECT: columns from one row of the stitched rows to the next
  double us = 0;
  double gemm_us = 0;
  double transfer_us = 0;
};

// Every algorithm of an operation, each by its best mover.
struct Options {
  std::array<Option, 3> option;
  int count = 0;

  const Option* find(xd_gemm_algo algo) const;
  // The fastest that can run; among equals the one that is listed first. nullptr = none can run.
  const Option* best() const;
};

// The time of one product of this rank alone.
double product_us(const Machine& machine, std::int64_t m, std::int64_t n, std::int64_t k,
                  const Problem& problem);
Options options_of(const Machine& machine, const Problem& problem, const Capacity& capacity);

// The least pitch, in columns, with which `rows` rows fill a multiple of `unit` bytes; 0 = none
// does.
std::int64_t cell_pitch(std::int64_t rows, std::int64_t columns, int element_bytes,
                        std::uint64_t unit, std::uint64_t most_bytes);

// One line: what hinders the algorithm, with what it would need.
std::string text_of(Obstacle obstacle, const Problem& problem, const Capacity& capacity);
// One line per algorithm of the operation: its estimate, or why it cannot run.
std::string text_of(const Options& options, const Problem& problem, const Capacity& capacity);

}  // namespace xd::gemm
