// Copies and sums of 8 KiB rows into scattered places, cached against streaming stores, beside one
// long memcpy. It shows from which total on the outputs should bypass the caches.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "ep/plan/config.h"
#include "ep/plan/cpu/rows.h"

namespace {

using xd::rows::Store;
using xd::rows::Type;

constexpr std::size_t kRow = 8192;

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// Rows of `total` bytes, touched, with the order in which they are visited.
struct Rows {
  explicit Rows(std::size_t total)
      : count(total / kRow),
        memory(static_cast<std::byte*>(std::aligned_alloc(4096, total))),
        order(count) {
    std::memset(memory.get(), 0, total);
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
  }
  std::byte* in_order(std::size_t i) const { return memory.get() + i * kRow; }
  std::byte* scattered(std::size_t i) const { return memory.get() + order[i] * kRow; }

  std::size_t count;
  std::unique_ptr<std::byte, FreeMemory> memory;
  std::vector<std::size_t> order;
};

std::size_t total_of(const benchmark::State& state) {
  return static_cast<std::size_t>(state.range(0)) << 20;
}

void count_bytes(benchmark::State& state, std::size_t per_iteration) {
  state.SetBytesProcessed(static_cast<std::int64_t>(per_iteration) *
                          static_cast<std::int64_t>(state.iterations()));
}

void long_memcpy(benchmark::State& state) {
  const Rows from(total_of(state)), to(total_of(state));
  for (auto _ : state) {
    std::memcpy(to.memory.get(), from.memory.get(), total_of(state));
    benchmark::ClobberMemory();
  }
  count_bytes(state, total_of(state));
}

// `read`: the outputs are read afterwards, as the tensor's next user would.
template <Store kStore, bool kRead>
void copy(benchmark::State& state) {
  const Rows from(total_of(state)), to(total_of(state));
  for (auto _ : state) {
    for (std::size_t i = 0; i < from.count; ++i) {
      xd::rows::copy(to.scattered(i), from.in_order(i), kRow, kStore);
    }
    xd::rows::flush();
    for (std::size_t i = 0; kRead && i < to.count; ++i) {
      benchmark::DoNotOptimize(
          xd::rows::dot(Type::f32, to.in_order(i), from.in_order(0), kRow / sizeof(float)));
    }
  }
  count_bytes(state, total_of(state));
}

// Each output is the sum of four rows in two partials; bytes are those of the outputs.
template <Store kStore>
void sum(benchmark::State& state) {
  const Rows from(total_of(state)), to(total_of(state) / 4);
  const int ends[] = {2, 4};
  for (auto _ : state) {
    for (std::size_t i = 0; i < to.count; ++i) {
      const void* const rows[] = {from.scattered(4 * i), from.scattered(4 * i + 1),
                                  from.scattered(4 * i + 2), from.scattered(4 * i + 3)};
      xd::rows::sum(Type::bf16, to.in_order(i), {rows, nullptr, ends, 2}, kRow / 2, kStore);
    }
    xd::rows::flush();
  }
  count_bytes(state, total_of(state) / 4);
}

// Throughput of the arithmetic itself, on rows that stay in the cache.
template <Type kType>
void sum_in_cache(benchmark::State& state) {
  const Rows rows(5 * kRow);
  const void* const terms[] = {rows.in_order(0), rows.in_order(1), rows.in_order(2),
                               rows.in_order(3)};
  const float weights[] = {0.1f, 0.2f, 0.3f, 0.4f};
  const int ends[] = {2, 4};
  for (auto _ : state) {
    xd::rows::sum(kType, rows.in_order(4), {terms, weights, ends, 2},
                  kRow / (kType == Type::f32 ? 4 : 2), Store::cached);
  }
  count_bytes(state, 4 * kRow);
}

template <Type kType>
void dot_in_cache(benchmark::State& state) {
  const Rows rows(2 * kRow);
  for (auto _ : state) {
    benchmark::DoNotOptimize(xd::rows::dot(kType, rows.in_order(0), rows.in_order(1),
                                           kRow / (kType == Type::f32 ? 4 : 2)));
  }
  count_bytes(state, 2 * kRow);
}

void quantise_in_cache(benchmark::State& state) {
  const Rows rows(2 * kRow);
  constexpr xd::ep::QuantiseFormat kFormat = xd::ep::quantise_format(XD_EP_QUANTISE_FP8_BLOCK128);
  float scales[kRow / 2 / kFormat.block];
  for (auto _ : state) {
    xd::rows::quantise_e4m3(kFormat, rows.in_order(1), scales, rows.in_order(0), kRow / 2);
  }
  count_bytes(state, kRow);
}

// Totals in MiB; two threads are two ranks at work.
void totals(benchmark::internal::Benchmark* benchmark) {
  for (const int mebibytes : {1, 4, 32, 128, 512}) benchmark->Arg(mebibytes);
  benchmark->ThreadRange(1, 2)->UseRealTime();
}

BENCHMARK(long_memcpy)->Apply(totals);
BENCHMARK(copy<Store::cached, false>)->Apply(totals);
BENCHMARK(copy<Store::streaming, false>)->Apply(totals);
BENCHMARK(copy<Store::cached, true>)->Apply(totals);
BENCHMARK(copy<Store::streaming, true>)->Apply(totals);
BENCHMARK(sum<Store::cached>)->Apply(totals);
BENCHMARK(sum<Store::streaming>)->Apply(totals);
BENCHMARK(sum_in_cache<Type::bf16>);
BENCHMARK(sum_in_cache<Type::f16>);
BENCHMARK(sum_in_cache<Type::f32>);
BENCHMARK(dot_in_cache<Type::bf16>);
BENCHMARK(dot_in_cache<Type::f32>);
BENCHMARK(quantise_in_cache);

}  // namespace

BENCHMARK_MAIN();
