// The part of LlBatch for groups whose rows lie without gaps, in tensors [N,H].
#include <algorithm>
#include <bit>
#include <span>

#include "conformance/slots/batch.h"

namespace xd::test {
namespace {

// More rows than there must be, of every tensor alike.
constexpr std::int64_t kSpareRows = 3;

}  // namespace

std::int32_t LlBatch::call_tokens() const {
  if (!case_.bounded) return 0;
  int most = 1;
  for (const Choices& choices : case_.choices(number_)) most = std::max(most, choices.tokens);
  return most;
}

std::int64_t LlBatch::row_bound() const {
  const std::vector<std::int32_t> owners = case_.owners();
  const xd_ll_config config = case_.config(owners);
  std::int64_t rows = 0;
  ok(xd_ll_recv_bound(&config, call_tokens(), &rows));
  return rows;
}

// Of a tensor [N,columns]; `pad` = the least distance that rows can keep.
std::vector<std::int64_t> LlBatch::row_strides(Slots slots, std::int64_t columns,
                                               std::int64_t pad) const {
  const std::int64_t row = columns + pad;
  if (slots == Slots::packed) return {};
  return {slots == Slots::backwards ? -row : row, 1};
}

void LlBatch::add_received_outputs() {
  const std::int64_t n = row_bound() + kSpareRows, k = choices_.topk;
  const bool by_rank = case_.receive == XD_LL_BY_RANK;
  const auto output = [&](const char* name, const DLTensor** slot, DLDataType type,
                          std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {}) {
    add(XD_LL_DISPATCH, name, slot, true,
        Strided(rank_, type, std::move(shape), std::move(strides)));
  };
  xd_ll_dispatch_args& args = dispatch_args;
  args.max_tokens = call_tokens();
  const auto unit = 16 / static_cast<std::int64_t>(element_bytes(types_.rows));
  output("recv_tokens", &args.recv_tokens, types_.rows, {n, columns_},
         row_strides(case_.slots, columns_, unit));
  if (types_.columns_per_scale > 0) {
    const std::int64_t scales = columns_ / types_.columns_per_scale;
    std::vector<std::int64_t> strides = row_strides(case_.scale_slots, scales, 1);
    // As a kernel for grouped products wants them: the rows of a block of columns side by side.
    if (case_.scale_slots == Slots::slots_first) strides = {1, n};
    output("recv_scales", &args.recv_scales, types_.scales, {n, scales}, strides);
  }
  output("row_offsets", &args.row_offsets, kI64,
         {static_cast<std::int64_t>(received_.offsets.size())});
  if (case_.weighs_dispatch()) {
    output("recv_weights", &args.recv_weights, kF32, by_rank ? std::vector{n, k} : std::vector{n});
  }
  if (by_rank && case_.extras) {
    output("recv_topk_idx", &args.recv_topk_idx, number_ % 2 == 0 ? kI64 : kI32, {n, k});
  }
}

void LlBatch::fill_received_results(Strided& tensor) const {
  for (std::size_t i = 0; i < received_.rows.size(); ++i) {
    const ReceivedRow& row = received_.rows[i];
    if (row.source < 0) continue;
    tensor.set_row(static_cast<std::int64_t>(i), 0,
                   bytes_of(result_row(row.expert, row.slot), case_.combine_dtype));
  }
}

void LlBatch::expect_rows_whole_or_zero(int source) {
  const bool counted = plan_info().recv_rows == static_cast<std::int64_t>(received_.rows.size());
  if (counted) expect_received_rows(source);
}

// Every row, its scales and weights, padding with zeros, and offsets; behind the last row only the
// choices are written, as none. `lossy`: as expect_rows_whole_or_zero() has it; -1 = none.
void LlBatch::expect_received_rows(int lossy) {
  const auto of = [&](const char* name, bool given) {
    return given ? field(XD_LL_DISPATCH, name).tensor : nullptr;
  };
  const bool by_rank = case_.receive == XD_LL_BY_RANK;
  Strided& tokens = *of("recv_tokens", true);
  Strided* const scales = of("recv_scales", types_.columns_per_scale > 0);
  Strided* const weights = of("recv_weights", case_.weighs_dispatch());
  Strided* const experts = of("recv_topk_idx", by_rank && case_.extras);
  const std::vector<int>& own = routing_.experts_of(rank_.rank);
  const auto rows = static_cast<std::int64_t>(received_.rows.size());
  const std::size_t row_bytes = static_cast<std::size_t>(columns_) * element_bytes(types_.rows);
  const std::vector<std::byte> got = lossy < 0 ? std::vector<std::byte>{} : tokens.read_buffer();
  const auto is_zero = [&](std::int64_t i) {
    const auto row = std::span(got).subspan(static_cast<std::size_t>(i) * row_bytes, row_bytes);
    return std::ranges::all_of(row, [](std::byte b) { return b == std::byte{0}; });
  };
  for (std::int64_t i = 0; i < (by_rank ? tokens.extent(0) : rows); ++i) {
    const ReceivedRow row = i < rows ? received_.rows[static_cast<std::size_t>(i)] : ReceivedRow{};
    const bool is_row = row.source >= 0;
    const bool has_come = is_row && (row.source != lossy || !is_zero(i));
    const SentRow* const sent = has_come ? &sent_row(row.source, row.token) : nullptr;
    if (i < rows) tokens.set_row(i, 0, sent ? sent->bytes : std::vector<std::byte>(row_bytes));
    for (std::int64_t c = 0; scales && i < rows && c < scales->extent(1); ++c) {
      scales->set(i, c, sent ? sent->scales[static_cast<std::size_t>(c)] : 0);
    }
    const auto weight_of = [&](int k) -> std::uint32_t {
      return std::bit_cast<std::uint32_t>(weight(kDispatchWeights, row.source, row.token, k));
    };
    if (!by_rank) {
      if (weights) weights->set(i, has_come ? weight_of(row.k) : 0);
      continue;
    }
    for (int k = 0; k < choices_.topk; ++k) {
      const std::int64_t id = is_row ? routing_.choices(row.source).id(row.token, k) : -1;
      const bool here = id >= 0 && routing_.owner(id) == rank_.rank;
      const auto local = std::ranges::find(own, static_cast<int>(id)) - own.begin();
      if (weights) weights->set(i, k, here && has_come ? weight_of(k) : 0);
      if (experts) experts->set(i, k, static_cast<std::uint64_t>(here ? local : -1));
    }
  }
  tokens.expect("recv_tokens");
  if (scales) scales->expect("recv_scales");
  if (weights) weights->expect("recv_weights");
  if (experts) experts->expect("recv_topk_idx");
  Strided& offsets = *of("row_offsets", true);
  for (std::size_t z = 0; z < received_.offsets.size(); ++z) {
    offsets.set(static_cast<std::int64_t>(z), static_cast<std::uint64_t>(received_.offsets[z]));
  }
  offsets.expect("row_offsets");
}

}  // namespace xd::test
