// The same dispatch and combine on MPI: pack, MPI_Alltoallv, unpack. crossdock-bench starts it with
// mpirun and the same arguments, and reads the lines "key value..." that it prints.
//
// It is the best that this scheme gives, not a straw man: counts are known beforehand and not
// timed; a token crosses once per destination rank and is fanned out by the receiver; rows that
// stay on their rank are never packed; in the rank layout MPI receives straight into the final
// tensor; the combine reduces a token's rows before they cross; copies and sums are the library's
// SIMD code, with cached and with streaming stores, of which the driver takes the faster.
#define OMPI_SKIP_MPICXX 1  // the deprecated C++ interface
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "ep/plan/cpu/rows.h"
#include "routing.h"
#include "start_line.h"

namespace {

using namespace bench;
using xd::rows::Store;

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;

Memory allocate(std::size_t bytes) {
  const std::size_t rounded = (bytes + 4096) / 4096 * 4096;
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, rounded)));
  if (!memory) throw std::bad_alloc();
  xd::rows::zero(memory.get(), rounded, Store::cached);  // touched before it is timed
  return memory;
}

xd::rows::Type row_type(Element element) {
  switch (element) {
    case Element::bf16:
      return xd::rows::Type::bf16;
    case Element::fp16:
      return xd::rows::Type::f16;
    case Element::fp32:
      return xd::rows::Type::f32;
    default:
      throw std::logic_error("not an element type of the CPU");
  }
}

// Counts and offsets of MPI_Alltoallv in rows; MPI sees a row as one datatype, so that its int
// arguments cannot overflow.
struct Schedule {
  std::vector<int> counts, offsets;
  int total = 0;
  void finish() {
    for (const int count : counts) {
      offsets.push_back(total);
      total += count;
    }
  }
};

class Peer {
 public:
  Peer(const Workload& workload, int rank) : w_(workload), rank_(rank) {
    const std::vector<Choices> routing = make_routing(w_);
    mine_ = place(w_, routing, rank_);
    const auto rows = count_rows(w_, routing);
    const auto me = static_cast<std::size_t>(rank_);
    for (std::size_t peer = 0; peer < rows.size(); ++peer) {
      out_.counts.push_back(peer == me ? 0 : static_cast<int>(rows[me][peer]));
      in_.counts.push_back(peer == me ? 0 : static_cast<int>(rows[peer][me]));
    }
    out_.finish();
    in_.finish();
    list_departures(routing);
    allocate_tensors();
    MPI_Type_contiguous(static_cast<int>(w_.row_bytes()), MPI_BYTE, &row_);
    MPI_Type_commit(&row_);
  }
  ~Peer() { MPI_Type_free(&row_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void dispatch(Store store) {
    for (std::size_t i = 0; i < departures_.size(); ++i) {
      copy(packed_, i, tokens_, static_cast<std::size_t>(departures_[i]), Store::cached);
    }
    const bool direct = w_.layout == Layout::rank;
    std::byte* const landing = direct ? recv_.get() : arrived_.get();
    const Schedule& in = direct ? final_ : in_;
    MPI_Alltoallv(packed_.get(), out_.counts.data(), out_.offsets.data(), row_, landing,
                  in.counts.data(), in.offsets.data(), row_, MPI_COMM_WORLD);
    std::size_t remote = 0;
    for (const Arrival& arrival : mine_.arrivals) {
      const bool local = arrival.source == rank_;
      if (!local && direct) continue;
      const std::byte* const from =
          local ? row(tokens_, static_cast<std::size_t>(arrival.token)) : row(arrived_, remote++);
      targets_.clear();
      for (int i = arrival.rows_begin; i < arrival.rows_end; ++i) {
        targets_.push_back(
            row(recv_, static_cast<std::size_t>(mine_.rows[static_cast<std::size_t>(i)])));
      }
      xd::rows::copy_to_many(targets_.data(), static_cast<int>(targets_.size()), from,
                             w_.row_bytes(), store);
    }
    for (const std::int32_t padding : mine_.padding_rows) {
      xd::rows::zero(row(recv_, static_cast<std::size_t>(padding)), w_.row_bytes(), store);
    }
    xd::rows::flush();
  }

  // Reads the receive tensor as the experts' output.
  void combine(Store store) {
    const bool direct = w_.layout == Layout::rank;
    if (!direct) reduce_arrivals();
    const Schedule& in = direct ? final_ : in_;
    MPI_Alltoallv(direct ? recv_.get() : arrived_.get(), in.counts.data(), in.offsets.data(), row_,
                  packed_.get(), out_.counts.data(), out_.offsets.data(), row_, MPI_COMM_WORLD);
    for (std::size_t t = 0; t < static_cast<std::size_t>(w_.tokens); ++t) sum_token(t, store);
    xd::rows::flush();
  }

  std::uint64_t recv_checksum() const {
    return checksum(recv_.get(), static_cast<std::size_t>(mine_.total) * w_.row_bytes(), 1);
  }
  std::uint64_t out_checksum() const {
    return checksum(result_.get(), static_cast<std::size_t>(w_.tokens) * w_.row_bytes(), 1);
  }
  long long sent_rows() const { return out_.total; }

 private:
  // Tokens in the order of the send buffer, and for each token the places of its rows: in that
  // buffer by destination rank, or in this rank's own receive tensor.
  void list_departures(const std::vector<Choices>& routing) {
    const auto tokens = static_cast<std::size_t>(w_.tokens);
    partials_.assign(tokens, {});
    own_arrival_.assign(tokens, nullptr);
    for (const Arrival& arrival : mine_.arrivals) {
      if (arrival.source == rank_) own_arrival_[static_cast<std::size_t>(arrival.token)] = &arrival;
    }
    const Choices& choices = routing[static_cast<std::size_t>(rank_)];
    for (int d = 0; d < w_.ranks; ++d) {
      for (int t = 0; t < w_.tokens; ++t) {
        const auto* const first = choices.data() + static_cast<std::ptrdiff_t>(t) * w_.topk;
        const bool goes = std::any_of(first, first + w_.topk,
                                      [&](auto e) { return e / w_.local_experts() == d; });
        if (!goes) continue;
        const int slot = d == rank_ ? kOwnRank : static_cast<int>(departures_.size());
        partials_[static_cast<std::size_t>(t)].push_back(slot);
        if (d != rank_) departures_.push_back(t);
      }
    }
    // In the rank layout the receive tensor also holds this rank's own rows.
    final_ = in_;
    final_.offsets.clear();
    int at = 0;
    for (int source = 0; source < w_.ranks; ++source) {
      final_.offsets.push_back(at);
      at += source == rank_ ? own_rows() : in_.counts[static_cast<std::size_t>(source)];
    }
  }

  int own_rows() const {
    return static_cast<int>(std::count_if(own_arrival_.begin(), own_arrival_.end(),
                                          [](const auto* arrival) { return arrival != nullptr; }));
  }

  void allocate_tensors() {
    const auto rows = [&](std::int64_t n) {
      return allocate(static_cast<std::size_t>(n) * w_.row_bytes());
    };
    tokens_ = rows(w_.tokens);
    result_ = rows(w_.tokens);
    packed_ = rows(out_.total);
    arrived_ = rows(w_.layout == Layout::rank ? 0 : in_.total);
    recv_ = rows(mine_.total);
    fill_tokens(w_, rank_, tokens_.get());
  }

  // Sums the rows of every token of another rank into its place in the buffer that goes back.
  void reduce_arrivals() {
    std::size_t remote = 0;
    for (const Arrival& arrival : mine_.arrivals) {
      if (arrival.source == rank_) continue;
      terms_.clear();
      add_terms(arrival);
      const int end = static_cast<int>(terms_.size());
      xd::rows::sum(row_type(w_.element), row(arrived_, remote++),
                    {terms_.data(), nullptr, &end, 1}, static_cast<std::size_t>(w_.hidden),
                    Store::cached);
    }
  }

  void add_terms(const Arrival& arrival) {
    for (int i = arrival.rows_begin; i < arrival.rows_end; ++i) {
      terms_.push_back(
          row(recv_, static_cast<std::size_t>(mine_.rows[static_cast<std::size_t>(i)])));
    }
  }

  void sum_token(std::size_t token, Store store) {
    terms_.clear();
    ends_.clear();
    for (const int slot : partials_[token]) {
      if (slot == kOwnRank) {
        add_terms(*own_arrival_[token]);
      } else {
        terms_.push_back(row(packed_, static_cast<std::size_t>(slot)));
      }
      ends_.push_back(static_cast<int>(terms_.size()));
    }
    xd::rows::sum(row_type(w_.element), row(result_, token),
                  {terms_.data(), nullptr, ends_.data(), static_cast<int>(ends_.size())},
                  static_cast<std::size_t>(w_.hidden), store);
  }

  std::byte* row(const Memory& memory, std::size_t i) const {
    return memory.get() + i * w_.row_bytes();
  }
  void copy(const Memory& to, std::size_t to_row, const Memory& from, std::size_t from_row,
            Store store) {
    xd::rows::copy(row(to, to_row), row(from, from_row), w_.row_bytes(), store);
  }

  static constexpr int kOwnRank = -1;

  const Workload w_;
  const int rank_;
  Placement mine_;
  Schedule out_, in_, final_;  // final_: in_ with the offsets of the rank layout's tensor
  std::vector<int> departures_;
  std::vector<std::vector<int>> partials_;  // per token: slot of the send buffer, or kOwnRank
  std::vector<const Arrival*> own_arrival_;
  Memory tokens_, result_, packed_, arrived_, recv_;
  MPI_Datatype row_ = MPI_DATATYPE_NULL;
  std::vector<void*> targets_;
  std::vector<const void*> terms_;
  std::vector<int> ends_;
};

double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

void print_line(const char* key, const char* name, const std::vector<double>& numbers) {
  std::printf("%s %s", key, name);
  for (const double number : numbers) std::printf(" %.9f", number);
  std::printf("\n");
}

// Times one operation; rank 0 prints the maximum over ranks of every iteration, and the seconds of
// processor of all ranks together.
void measure(const Workload& w, int rank, const char* name, const std::function<void()>& body) {
  std::vector<double> seconds, processor;
  for (int i = 0; i < w.warmup + w.iters; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    std::int64_t start = choose_start();
    MPI_Bcast(&start, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    wait_for_start(start);
    const double begun = processor_seconds();
    body();
    if (i < w.warmup) continue;
    seconds.push_back(seconds_since(start));
    processor.push_back(processor_seconds() - begun);
  }
  std::vector<double> slowest(seconds.size()), all(seconds.size());
  MPI_Reduce(seconds.data(), slowest.data(), w.iters, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Reduce(processor.data(), all.data(), w.iters, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  print_line("time", name, slowest);
  print_line("cpu", name, all);
}

void print_facts(const Peer& peer, int rank, int ranks) {
  const std::uint64_t mine[] = {peer.recv_checksum(), peer.out_checksum(),
                                static_cast<std::uint64_t>(peer.sent_rows())};
  std::vector<std::uint64_t> all(3 * static_cast<std::size_t>(ranks));
  MPI_Gather(mine, 3, MPI_UINT64_T, all.data(), 3, MPI_UINT64_T, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  std::printf("version %.*s\n", static_cast<int>(std::string_view(version).find(',')), version);
  for (int r = 0; r < ranks; ++r) {
    const auto* const facts = &all[3 * static_cast<std::size_t>(r)];
    std::printf("rank %d %llu %llu %llu\n", r, static_cast<unsigned long long>(facts[0]),
                static_cast<unsigned long long>(facts[1]),
                static_cast<unsigned long long>(facts[2]));
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  try {
    const Workload w = parse_options({argv + 1, argv + argc}, ranks).workload;
    Peer peer(w, rank);
    for (const Store store : {Store::cached, Store::streaming}) {
      measure(w, rank, "dispatch", [&] { peer.dispatch(store); });
      measure(w, rank, "combine", [&] { peer.combine(store); });
    }
    print_facts(peer, rank, ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-bench-mpi: rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return MPI_Finalize();
}
