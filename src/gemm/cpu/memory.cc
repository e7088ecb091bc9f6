#include "gemm/cpu/memory.h"

#include <new>

namespace xd::gemm::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

std::byte* allocate(std::uint64_t bytes) {
  return static_cast<std::byte*>(::operator new(bytes, kAlignment));
}

}  // namespace

Map Map::make(const Config& c) {
  const auto ranks = static_cast<std::uint64_t>(c.ranks);
  const auto tokens = static_cast<std::uint64_t>(c.max_tokens);
  const std::uint64_t gathered = c.gathers() ? at(c.max_k) * c.gathered_bytes() : 0;
  const std::uint64_t summed = c.sums() ? at(c.max_n) * c.summed_bytes() : 0;
  LayoutCursor cursor;
  Map map{};
  map.turn = turn::TurnMap::add<Record>(cursor, c.ranks);
  map.ready = cursor.add<std::byte>(ranks * kWordBytes, kWordBytes);
  map.summed = cursor.add<std::byte>(ranks * kWordBytes, kWordBytes);
  map.sums = cursor.add<float>(at(c.max_n), 64);
  map.scales =
      cursor.add<float>(c.has(XD_GEMM_ALL_GATHER) ? tokens * at(scale_blocks(c.max_k)) : 0, 64);
  map.rows = cursor.add<std::byte>(tokens * gathered, 256);
  map.partials = cursor.add<std::byte>(ranks * tokens * summed, 256);
  map.end = cursor.add<std::byte>(0, 256);
  return map;
}

Scratch::Layout Scratch::Layout::make(const Config& c) {
  const bool gathers = c.has(XD_GEMM_ALL_GATHER);
  const std::uint64_t rows = gathers ? at(c.all_tokens()) : 0;
  LayoutCursor cursor;
  Layout layout{};
  layout.a_panel = cursor.add<float>(kTileRows * kTileDepth, 64);
  layout.b_panel = cursor.add<float>(kTileColumns * kTileDepth, 64);
  layout.tile = cursor.add<float>(kTileRows * kTileColumns, 64);
  layout.line = cursor.add<float>(2 * kLineFloats, 64);
  layout.gathered = cursor.add<std::byte>(rows * at(c.max_k) * c.gathered_bytes(), 64);
  layout.gathered_scales = cursor.add<float>(rows * at(scale_blocks(c.max_k)), 64);
  layout.column_sums = cursor.add<float>(gathers ? at(c.ranks) * at(c.max_n) : 0, 64);
  layout.starts = cursor.add<std::int64_t>(at(c.ranks) + 1, 64);
  layout.end = cursor.at;
  return layout;
}

Scratch::Scratch(const Config& config)
    : layout_(Layout::make(config)), ranks_(config.ranks), memory_(allocate(layout_.end)) {}

std::uint64_t Scratch::bytes(const Config& config) { return Layout::make(config).end; }

void Scratch::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }

}  // namespace xd::gemm::cpu
