#include "ep/plan/cuda/device_slot_table.h"

#include <algorithm>
#include <atomic>
#include <span>

#include "base/error.h"
#include "base/layout.h"
#include "base/math.h"

namespace xd::ep::cuda {

// Byte offsets in a table's device memory. The image's words follow one another from `lists` on.
struct DeviceSlotTable::Layout {
  std::uint64_t table, lists, experts, slots, loads, ids, end;
};

DeviceSlotTable::Layout DeviceSlotTable::layout_of(const CommonConfig& config, bool counts_loads) {
  const std::size_t logical = at(config.logical_experts);
  LayoutCursor cursor;
  Layout layout{};
  layout.table = cursor.add<SlotTableDevice>(1);
  layout.lists = cursor.add<SlotList>(logical);
  layout.experts = cursor.add<std::int32_t>(at(config.experts));
  layout.slots = cursor.add<std::uint32_t>(kMostChoices);
  layout.loads = cursor.add<std::uint64_t>(counts_loads ? at(config.ranks) * logical : 0);
  const bool is_bulk = counts_loads;  // its prepare looks slots up itself
  layout.ids = cursor.add<std::int32_t>(is_bulk ? 0 : at(config.max_tokens) * at(config.max_topk));
  layout.end = cursor.at;
  return layout;
}

std::uint64_t DeviceSlotTable::bytes(const CommonConfig& config, bool counts_loads) {
  return config.logical_experts > 0 ? layout_of(config, counts_loads).end : 0;
}

DeviceSlotTable::DeviceSlotTable(const CommonConfig& config, const SlotTable& first, int rank,
                                 int device, bool counts_loads)
    : config_(config), rank_(rank), device_(device) {
  if (config.logical_experts == 0) return;
  const Layout layout = layout_of(config, counts_loads);
  memory_ = xd::cuda::DeviceBuffer(device, layout.end, "a group's table of slots");
  told_ = xd::cuda::PinnedBlock(device, sizeof(std::uint64_t));
  std::byte* const base = memory_.data();
  XD_CHECK(layout.lists == layout.table + sizeof(SlotTableDevice));
  XD_CHECK(layout.experts == layout.lists + at(config.logical_experts) * sizeof(SlotList));
  XD_CHECK(layout.slots == layout.experts + at(config.experts) * sizeof(std::int32_t));
  lists_ = reinterpret_cast<SlotList*>(base + layout.lists);
  ids_ = reinterpret_cast<std::int32_t*>(base + layout.ids);
  SlotTableDevice table{};
  table.hash = first.hash();
  table.experts = reinterpret_cast<const std::int32_t*>(base + layout.experts);
  table.slots = reinterpret_cast<const std::uint32_t*>(base + layout.slots);
  table.host_told = told_.as<std::uint64_t>();
  if (counts_loads) loads_ = reinterpret_cast<unsigned long long*>(base + layout.loads);
  table.loads = loads_;
  table.logical_experts = config.logical_experts;
  memory_.write(layout.table, &table, sizeof(table));
  const std::vector<std::uint32_t> words = words_of(first);
  memory_.write(layout.lists, words.data(), std::span(words).size_bytes());
}

// The lists, in which slots go by the numbers that a router without logical experts would name, and
// the experts by their slots' physical numbers.
std::vector<std::uint32_t> DeviceSlotTable::words_of(const SlotTable& table) const {
  std::vector<std::uint32_t> name(at(config_.experts));
  for (int slot = 0; slot < config_.experts; ++slot) {
    name[at(config_.map().physical_expert_of(slot))] = static_cast<std::uint32_t>(slot);
  }
  std::vector<std::uint32_t> words;
  for (std::size_t e = 0; e + 1 < table.firsts().size(); ++e) {
    const std::uint32_t first = table.firsts()[e], count = table.firsts()[e + 1] - first;
    words.push_back(count);
    words.push_back(count == 1 ? name[table.slots()[first]] : first);
  }
  words.insert(words.end(), table.experts().begin(), table.experts().end());
  for (const std::uint32_t slot : table.slots()) words.push_back(name[slot]);
  return words;
}

DeviceSlotTable::Image& DeviceSlotTable::free_image(std::size_t words) {
  for (Image& image : images_) {
    // Acquire: the kernel has read all of it.
    const bool free = std::atomic_ref(*image.read()).load(std::memory_order_acquire) != 0;
    if (free && image.room >= words) return image;
  }
  const std::size_t bytes = (words + 1) * sizeof(std::uint32_t);
  images_.push_back({.memory = xd::cuda::PinnedBlock(device_, bytes), .room = words});
  return images_.back();
}

SlotTableChange DeviceSlotTable::prepare_change(const SlotTable& table) {
  XD_REQUIRE(table.slots().size() <= kMostChoices, "placement.choice_slots: rank ", rank_,
             "'s lists have ", table.slots().size(), " slots together, expected at most ",
             kMostChoices, " on CUDA devices");
  const std::vector<std::uint32_t> words = words_of(table);
  const Image& image = free_image(words.size());
  std::atomic_ref(*image.read()).store(0, std::memory_order_relaxed);
  std::ranges::copy(words, image.words());
  return {.image = image.words(),
          .image_words = static_cast<std::uint32_t>(words.size()),
          .image_read = image.read(),
          .words = reinterpret_cast<std::uint32_t*>(lists_),
          .hash = table.hash(),
          .table = device()};
}

void DeviceSlotTable::set_read(std::uint32_t* image_read) {
  std::atomic_ref(*image_read).store(1, std::memory_order_release);
}

std::int64_t DeviceSlotTable::unplaced() const {
  if (told_.data() == nullptr) return 0;
  return static_cast<std::int64_t>(
      std::atomic_ref(*told_.as<std::uint64_t>()).load(std::memory_order_relaxed));
}

}  // namespace xd::ep::cuda
