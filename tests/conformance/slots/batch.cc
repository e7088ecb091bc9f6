#include "conformance/slots/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>

#include "conformance/quantised.h"
#include "support/random.h"

namespace xd::test {
namespace {

// The bytes of an input behind the rows and between them: NaN, in every type.
constexpr std::byte kNotToBeRead{0xFF};
// The bytes of an input when its call has ended.
constexpr std::byte kOverwritten{0x3C};
constexpr std::int64_t kFirstLoad = 1000, kFirstWait = 5;

constexpr std::uint64_t kCombineWeights = 0xC0;

// 8 bytes of ones arrive as another NaN on CUDA devices.
void replace_ones(std::vector<std::byte>& row) {
  for (std::size_t at = 0; at + 8 <= row.size(); at += 8) {
    const auto word = std::span(row).subspan(at, 8);
    if (std::ranges::all_of(word, [](std::byte b) { return b == std::byte{0xFF}; })) {
      word[7] = std::byte{0x7F};
    }
  }
}

}  // namespace

std::vector<std::byte> LlBatch::bytes_of(const std::vector<std::uint32_t>& codes, DLDataType type) {
  const std::size_t element = element_bytes(type);
  std::vector<std::byte> bytes(codes.size() * element);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    std::memcpy(bytes.data() + i * element, &codes[i], element);  // little-endian
  }
  return bytes;
}

LlBatch::LlBatch(const Rank& rank, const LlCase& c, int number, const std::vector<bool>& absent)
    : rank_(rank),
      case_(c),
      number_(number),
      seed_(mix(c.seed, 0xBA7C4, static_cast<std::uint64_t>(number))),
      routing_(c.routing(number, absent)),
      received_(received_rows(routing_, rank.rank, c.receive, c.alignment)),
      choices_(c.ids(number)[static_cast<std::size_t>(rank.rank)]),
      types_(sent_types(c)),
      columns_(c.columns_of(number)),
      combine_columns_(std::int64_t{16} * c.units_of(number) /
                       static_cast<std::int64_t>(element_bytes(c.combine_dtype))) {
  const std::vector<std::int32_t> owners = c.owners();
  plan_ = make_plan(rank, c.config(owners));
  plan_.fill(kPoison);
  set_plan(dispatch_args, plan_);
  dispatch_args.quantise = types_.quantise;
  use_plan(plan_);
  add_dispatch_inputs();
  add_dispatch_outputs();
  add_combine();
  reset_tensors(XD_LL_DISPATCH);
  reset_tensors(XD_LL_COMBINE);
}

void LlBatch::use_plan(const Buffer& plan) { set_plan(combine_args, plan); }

Strided& LlBatch::add(xd_ll_operation operation, const char* name, const DLTensor** slot,
                      bool output, Strided tensor) {
  Strided& kept = tensors_.emplace_back(std::move(tensor));
  *slot = kept.dl();
  fields_.push_back({operation, name, slot, output, &kept});
  return kept;
}

void LlBatch::add_dispatch_inputs() {
  const std::int64_t t = choices_.tokens, k = choices_.topk;
  const auto input = [&](const char* name, const DLTensor** slot, DLDataType type,
                         std::int64_t columns, std::vector<std::int64_t> strides = {}) {
    add(XD_LL_DISPATCH, name, slot, false, Strided(rank_, type, {t, columns}, std::move(strides)));
  };
  input("tokens", &dispatch_args.tokens, types_.tokens, columns_);
  if (is_given(case_.sent) && types_.columns_per_scale > 0) {
    const std::int64_t scales = columns_ / types_.columns_per_scale;
    std::vector<std::int64_t> strides = row_strides(case_.scale_slots, scales, 1);
    if (case_.scale_slots == Slots::slots_first) strides = {1, std::max<std::int64_t>(t, 1)};
    input("scales", &dispatch_args.scales, types_.scales, scales, std::move(strides));
  }
  input("topk_idx", &dispatch_args.topk_idx, case_.index_type, k);
  if (case_.weighs_dispatch()) {
    input("topk_weights", &dispatch_args.topk_weights, kF32, k);
  }
  if (case_.tables != Tables::none && case_.table(number_).hints) {
    add(XD_LL_DISPATCH, "replica_hint", &dispatch_args.replica_hint, false,
        Strided(rank_, number_ % 2 == 0 ? kI32 : kI64, {t}));
  }
}

void LlBatch::add_dispatch_outputs() {
  const auto l = static_cast<std::int64_t>(routing_.experts_of(rank_.rank).size());
  const std::int64_t s = case_.num_slots(), w = case_.num_ranks;
  const auto output = [&](const char* name, const DLTensor** slot, DLDataType type,
                          std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {}) {
    add(XD_LL_DISPATCH, name, slot, true,
        Strided(rank_, type, std::move(shape), std::move(strides)));
  };
  xd_ll_dispatch_args& args = dispatch_args;
  output("counts", &args.counts, kI32, {l});
  if (case_.extras) {
    output("expert_load", &args.expert_load, number_ % 2 == 0 ? kI32 : kI64, {l});
    output("wait_ns", &args.wait_ns, kI64, {w});
  }
  if (!case_.has_slots()) return add_received_outputs();
  const auto unit = 16 / static_cast<std::int64_t>(element_bytes(types_.rows));
  output("recv_tokens", &args.recv_tokens, types_.rows, {l, s, columns_},
         strides_of(case_.slots, columns_, unit));
  if (types_.columns_per_scale > 0) {
    const std::int64_t scales = columns_ / types_.columns_per_scale;
    std::vector<std::int64_t> strides = strides_of(case_.scale_slots, scales, 1);
    // As a kernel for grouped products wants them: the slots of a block of columns side by side.
    if (case_.scale_slots == Slots::slots_first) strides = {s * scales + 3, 1, s};
    output("recv_scales", &args.recv_scales, types_.scales, {l, s, scales}, strides);
  }
  if (!case_.extras) return;
  output("source_ranges", &args.source_ranges, kI64, {l, w});
  output("source_tokens", &args.source_tokens, kI32, {l, s});
}

void LlBatch::add_combine() {
  const auto l = static_cast<std::int64_t>(routing_.experts_of(rank_.rank).size());
  const std::int64_t s = case_.num_slots(), t = choices_.tokens;
  const auto unit = 16 / static_cast<std::int64_t>(element_bytes(case_.combine_dtype));
  xd_ll_combine_args& args = combine_args;
  Strided results =
      case_.has_slots()
          ? Strided(rank_, case_.combine_dtype, {l, s, combine_columns_},
                    strides_of(case_.slots, combine_columns_, unit), kNotToBeRead)
          : Strided(rank_, case_.combine_dtype,
                    {static_cast<std::int64_t>(received_.rows.size()), combine_columns_},
                    row_strides(case_.slots, combine_columns_, unit), kNotToBeRead);
  add(XD_LL_COMBINE, "expert_out", &args.expert_out, false, std::move(results));
  if (case_.weighs_combine()) {
    add(XD_LL_COMBINE, "topk_weights", &args.topk_weights, false,
        Strided(rank_, kF32, {t, choices_.topk}));
  }
  args.wire = case_.wire;
  add(XD_LL_COMBINE, "out", &args.out, true,
      Strided(rank_, case_.combine_dtype, {t, combine_columns_}));
  if (case_.extras) {
    add(XD_LL_COMBINE, "wait_ns", &args.wait_ns, true, Strided(rank_, kI64, {case_.num_ranks}));
  }
}

// Of a tensor [L,S,columns]; `pad` = the least distance that rows can keep.
std::vector<std::int64_t> LlBatch::strides_of(Slots slots, std::int64_t columns,
                                              std::int64_t pad) const {
  const auto l = static_cast<std::int64_t>(routing_.experts_of(rank_.rank).size());
  const std::int64_t s = case_.num_slots(), row = columns + pad;
  switch (slots) {
    case Slots::packed:
      return {};
    case Slots::padded:
      return {s * row + 3 * pad, row, 1};
    case Slots::slots_first:
      return {row, std::max<std::int64_t>(l, 1) * row, 1};
    case Slots::backwards:
      return {-s * row, -row, 1};
  }
  return {};
}

LlBatch::Field& LlBatch::field(xd_ll_operation operation, const std::string& name) {
  for (Field& field : fields_) {
    if (field.operation == operation && field.name == name) return field;
  }
  throw std::logic_error("no tensor argument " + name);
}

// ---- Content ------------------------------------------------------------------------------------

// Any bits, unless they are quantised.
std::vector<std::byte> LlBatch::token_row(int source, int token) const {
  const auto columns = static_cast<std::size_t>(columns_);
  std::vector<std::uint32_t> codes(columns);
  const std::uint64_t row =
      mix(seed_, 0x70C, static_cast<std::uint64_t>(source), static_cast<std::uint64_t>(token));
  const std::uint32_t ones = ones_of(token);
  for (std::size_t c = 0; c < columns; ++c) {
    if (case_.every_number) {
      const auto at = static_cast<std::uint32_t>(static_cast<std::size_t>(token) * columns + c);
      codes[c] = (number_ % 2 == 0 ? at : at * 40503u) & 0xffffu;
      continue;
    }
    codes[c] =
        types_.quantise == XD_EP_QUANTISE_NONE
            ? static_cast<std::uint32_t>(mix(row + c)) | ones
            : float_code({row, Content::tokens, 0, 0, static_cast<std::int64_t>(c)}, kFormatBf16);
  }
  std::vector<std::byte> bytes = bytes_of(codes, types_.tokens);
  for (std::size_t at = 0; has_words_of_ones(token) && at < bytes.size(); ++at) {
    if (const int one = byte_of_ones(row, at); one >= 0) bytes[at] = static_cast<std::byte>(one);
  }
  return bytes;
}

std::uint32_t LlBatch::ones_of(int token) const {
  return is_given(case_.sent) && token % 5 == 3 ? ~0u : 0;
}

// Of the words of 8 bytes some are all ones, some all ones but their highest bit, some any bits.
bool LlBatch::has_words_of_ones(int token) const { return is_given(case_.sent) && token % 5 == 1; }

int LlBatch::byte_of_ones(std::uint64_t row, std::size_t at) {
  const std::uint64_t kind = mix(row, 0x0E5, at / 8) % 3;
  if (kind == 2) return -1;
  return kind == 1 && at % 8 == 7 ? 0x7F : 0xFF;
}

std::uint32_t LlBatch::given_scale(int source, int token, std::int64_t column) const {
  const std::uint64_t row =
      mix(seed_, 0x5CA, static_cast<std::uint64_t>(source), static_cast<std::uint64_t>(token));
  auto code = static_cast<std::uint32_t>(mix(row + static_cast<std::uint64_t>(column)));
  const std::size_t size = types_.scales.bits / 8;
  for (std::size_t i = 0; has_words_of_ones(token) && i < size; ++i) {
    const int one = byte_of_ones(row, static_cast<std::size_t>(column) * size + i);
    if (one >= 0) code = (code & ~(0xFFu << 8 * i)) | static_cast<std::uint32_t>(one) << 8 * i;
  }
  return (code | ones_of(token)) & (types_.scales.bits == 8 ? 0xFFu : ~0u);
}

const LlBatch::SentRow& LlBatch::sent_row(int source, int token) {
  const auto [at, fresh] = sent_rows_.try_emplace({source, token});
  SentRow& sent = at->second;
  if (!fresh) return sent;
  sent.bytes = token_row(source, token);
  if (types_.quantise == XD_EP_QUANTISE_NONE) {
    for (std::int64_t c = 0;
         types_.columns_per_scale > 0 && c < columns_ / types_.columns_per_scale; ++c) {
      sent.scales.push_back(given_scale(source, token, c));
    }
    return sent;
  }
  std::vector<std::uint16_t> codes(static_cast<std::size_t>(columns_));
  std::memcpy(codes.data(), sent.bytes.data(), sent.bytes.size());
  const QuantisedWay way = quantised_way(types_.quantise);
  sent.bytes.clear();
  std::vector<std::uint32_t> scales;
  for (std::size_t at_code = 0; at_code < codes.size(); at_code += 128) {
    const QuantisedBlock block = quantised_block(way, std::span(codes).subspan(at_code, 128));
    for (const std::uint8_t code : block.elements) sent.bytes.push_back(std::byte{code});
    scales.push_back(block.scale);
  }
  if (rank_.asynchronous()) replace_ones(sent.bytes);
  if (case_.sent != Sent::packed) {
    sent.scales = scales;
    return sent;
  }
  for (std::size_t i = 0; i < scales.size(); i += 4) {
    sent.scales.push_back(scales[i] | scales[i + 1] << 8 | scales[i + 2] << 16 |
                          scales[i + 3] << 24);
  }
  return sent;
}

std::vector<std::uint32_t> LlBatch::result_row(int expert, std::int64_t slot) const {
  const std::uint64_t row = mix(seed_, 0x0E7, combines_, static_cast<std::uint64_t>(expert),
                                static_cast<std::uint64_t>(slot));
  const Format format = format_of(case_.combine_dtype);
  std::vector<std::uint32_t> codes(static_cast<std::size_t>(combine_columns_));
  for (std::size_t c = 0; c < codes.size(); ++c) {
    codes[c] = float_code({row, Content::expert_out, 0, 0, static_cast<std::int64_t>(c)}, format);
  }
  return codes;
}

float LlBatch::weight(std::uint64_t salt, int source, int token, int k) const {
  return weight_value({mix(seed_, salt), Content::topk_weights, source, token, k});
}

void LlBatch::fill_weights(Strided& tensor, std::uint64_t salt) const {
  const Choices& good = routing_.choices(rank_.rank);
  for (int t = 0; t < choices_.tokens; ++t) {
    for (int k = 0; k < choices_.topk; ++k) {
      // The weight of a choice that has no row must not matter.
      const bool counts = good.id(t, k) >= 0;
      tensor.set(
          t, k,
          counts ? std::bit_cast<std::uint32_t>(weight(salt, rank_.rank, t, k)) : 0x7fc12345u);
    }
  }
}

void LlBatch::fill_results(Strided& tensor) const {
  const std::vector<int>& experts = routing_.experts_of(rank_.rank);
  tensor.fill_image(kNotToBeRead);
  if (!case_.has_slots()) return fill_received_results(tensor);
  for (std::size_t l = 0; l < experts.size(); ++l) {
    const auto rows = static_cast<std::int64_t>(routing_.rows(experts[l]).size());
    for (std::int64_t slot = 0; slot < rows; ++slot) {
      tensor.set_row(static_cast<std::int64_t>(l), slot,
                     bytes_of(result_row(experts[l], slot), case_.combine_dtype));
    }
  }
}

void LlBatch::fill_inputs(xd_ll_operation operation) {
  for (Field& field : fields_) {
    if (field.operation != operation || field.output) continue;
    const std::string name = field.name;
    Strided& tensor = *field.tensor;
    if (name == "tokens") {
      for (int t = 0; t < choices_.tokens; ++t) tensor.set_row(t, 0, token_row(rank_.rank, t));
    } else if (name == "scales") {
      for (int t = 0; t < choices_.tokens; ++t) {
        for (std::int64_t c = 0; c < tensor.extent(1); ++c) {
          tensor.set(t, c, given_scale(rank_.rank, t, c));
        }
      }
    } else if (name == "topk_idx") {
      for (int t = 0; t < choices_.tokens; ++t) {
        for (int k = 0; k < choices_.topk; ++k) {
          tensor.set(t, k, static_cast<std::uint64_t>(choices_.id(t, k)));
        }
      }
    } else if (name == "replica_hint") {
      for (int t = 0; t < choices_.tokens; ++t) {
        tensor.set(t, static_cast<std::uint64_t>(Table::hint_of(rank_.rank, t)));
      }
    } else if (name == "expert_out") {
      fill_results(tensor);
    } else {
      fill_weights(tensor,
                   operation == XD_LL_DISPATCH ? kDispatchWeights : kCombineWeights + combines_);
    }
    tensor.upload();
  }
}

void LlBatch::reset_tensors(xd_ll_operation operation) {
  fill_inputs(operation);
  for (Field& field : fields_) {
    if (field.operation != operation || !field.output) continue;
    const std::string name = field.name;
    Strided& tensor = *field.tensor;
    tensor.fill_image(kPoison);
    for (std::int64_t i = 0; name == "expert_load" && i < tensor.extent(0); ++i) {
      tensor.set(i, static_cast<std::uint64_t>(kFirstLoad + i));
    }
    for (std::int64_t i = 0; name == "wait_ns" && i < tensor.extent(0); ++i) {
      tensor.set(i, static_cast<std::uint64_t>(kFirstWait + i));
    }
    tensor.upload();
  }
}

void LlBatch::overwrite_inputs(xd_ll_operation operation) {
  for (Field& field : fields_) {
    if (field.operation == operation && !field.output) field.tensor->buffer().fill(kOverwritten);
  }
}

void LlBatch::next_combine() {
  ++combines_;
  reset_tensors(XD_LL_COMBINE);
}

// ---- Calls --------------------------------------------------------------------------------------

xd_status LlBatch::enqueue(xd_ll_group* group, xd_ll_operation operation, xd_ll_phase phase) {
  if (operation == XD_LL_DISPATCH) {
    dispatch_args.phase = phase;
    return xd_ll_dispatch(group, &dispatch_args, rank_.stream());
  }
  combine_args.phase = phase;
  return xd_ll_combine(group, &combine_args, rank_.stream());
}

LlOutcome LlBatch::call(xd_ll_group* group, xd_ll_operation operation, xd_ll_phase phase) {
  return finish(rank_, group, enqueue(group, operation, phase));
}

// A half needs the arguments of its own only; every other batch gives it all of them.
LlOutcome LlBatch::call_sparingly(xd_ll_group* group, xd_ll_operation operation,
                                  xd_ll_phase phase) {
  const auto whole = std::tuple(dispatch_args, combine_args);
  for (Field& field : fields_) {
    const bool used = phase == XD_LL_PHASE_BOTH || number_ % 2 != 0 ||
                      field.output == (phase == XD_LL_PHASE_RECEIVE);
    if (field.operation == operation && !used) *field.slot = nullptr;
  }
  const LlOutcome outcome = call(group, operation, phase);
  std::tie(dispatch_args, combine_args) = whole;
  if (phase == XD_LL_PHASE_SEND) {
    ok(outcome);
    EXPECT_EQ(written(operation), "");
    overwrite_inputs(operation);
  }
  return outcome;
}

void LlBatch::dispatch(xd_ll_group* group, xd_ll_phase phase) {
  const LlOutcome outcome = call_sparingly(group, XD_LL_DISPATCH, phase);
  if (phase != XD_LL_PHASE_SEND) expect_dispatched(outcome);
}

void LlBatch::combine(xd_ll_group* group, xd_ll_phase phase) {
  const LlOutcome outcome = call_sparingly(group, XD_LL_COMBINE, phase);
  if (phase != XD_LL_PHASE_SEND) expect_combined(outcome);
}

// ---- Expectations -------------------------------------------------------------------------------

std::string LlBatch::written(xd_ll_operation operation) const {
  std::string names;
  for (const Field& field : fields_) {
    if (field.operation != operation || !field.output || field.tensor->untouched()) continue;
    if (field.name == std::string("wait_ns")) continue;
    names += (names.empty() ? "" : ", ") + std::string(field.name);
  }
  return names;
}

xd_ll_plan_info LlBatch::plan_info() const {
  const std::vector<std::byte> bytes = plan_.read();
  xd_ll_plan_info info = XD_LL_PLAN_INFO_INIT;
  ok(xd_ll_plan_get_info(bytes.data(), bytes.size(), &info));
  return info;
}

void LlBatch::expect_plan() const {
  EXPECT_TRUE(plan_.guards_intact());
  const xd_ll_plan_info info = plan_info();
  EXPECT_EQ(info.rank, rank_.rank);
  EXPECT_EQ(info.num_ranks, rank_.num_ranks);
  EXPECT_EQ(info.num_experts, static_cast<std::int32_t>(case_.owners().size()));
  EXPECT_EQ(info.num_tokens, choices_.tokens);
  EXPECT_EQ(info.topk, choices_.topk);
  EXPECT_EQ(info.recv_rows, case_.has_slots() ? routing_.rows_of(rank_.rank)
                                              : static_cast<std::int64_t>(received_.rows.size()));
  EXPECT_EQ(info.bad_ids, routing_.bad_ids());
  EXPECT_EQ(info.bad_id_rank, routing_.bad_id_rank());
}

void LlBatch::expect_rows() {
  if (!case_.has_slots()) return expect_received_rows();
  expect_slots();
  if (case_.extras) expect_ranges();
}

// Every slot that has a row, its scales and its token's index; nothing else.
void LlBatch::expect_slots() {
  const std::vector<int>& experts = routing_.experts_of(rank_.rank);
  Strided& tokens = *field(XD_LL_DISPATCH, "recv_tokens").tensor;
  Strided* const scales =
      types_.columns_per_scale > 0 ? field(XD_LL_DISPATCH, "recv_scales").tensor : nullptr;
  Strided* const indices = case_.extras ? field(XD_LL_DISPATCH, "source_tokens").tensor : nullptr;
  for (std::size_t l = 0; l < experts.size(); ++l) {
    const auto e = static_cast<std::int64_t>(l);
    const std::vector<SlotRow>& rows = routing_.rows(experts[l]);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto slot = static_cast<std::int64_t>(r);
      const SentRow& sent = sent_row(rows[r].source, rows[r].token);
      tokens.set_row(e, slot, sent.bytes);
      for (std::size_t c = 0; scales && c < sent.scales.size(); ++c) {
        scales->set(e, slot, static_cast<std::int64_t>(c), sent.scales[c]);
      }
      if (indices) indices->set(e, slot, static_cast<std::uint64_t>(rows[r].token));
    }
  }
  tokens.expect("recv_tokens");
  if (scales) scales->expect("recv_scales");
  if (indices) indices->expect("source_tokens");
}

void LlBatch::expect_ranges() {
  const std::vector<int>& experts = routing_.experts_of(rank_.rank);
  Strided& ranges = *field(XD_LL_DISPATCH, "source_ranges").tensor;
  for (std::size_t l = 0; l < experts.size(); ++l) {
    const auto e = static_cast<std::int64_t>(l);
    const std::vector<SlotRow>& rows = routing_.rows(experts[l]);
    std::uint64_t first = 0;
    for (int source = 0; source < rank_.num_ranks; ++source) {
      const auto count = static_cast<std::uint64_t>(
          std::ranges::count_if(rows, [&](const SlotRow& row) { return row.source == source; }));
      ranges.set(e, source, first << 32 | count);
      first += count;
    }
  }
  ranges.expect("source_ranges");
}

// They only grow, and this rank never waits for itself.
void LlBatch::expect_waits(const char* name, Strided& tensor) const {
  EXPECT_TRUE(tensor.buffer().guards_intact()) << name;
  const std::vector<std::byte> bytes = tensor.read_buffer();
  for (std::int64_t r = 0; r < tensor.extent(0); ++r) {
    std::int64_t waited = 0;
    std::memcpy(&waited, bytes.data() + static_cast<std::size_t>(r) * 8, sizeof(waited));
    waited -= kFirstWait + r;
    EXPECT_GE(waited, 0) << name << "[" << r << "]";
    EXPECT_LE(waited, std::int64_t{60'000'000'000}) << name << "[" << r << "]";
    EXPECT_TRUE(r != rank_.rank || waited == 0) << name << "[" << r << "] grew by " << waited;
  }
}

void LlBatch::expect_dispatched(const LlOutcome& outcome) {
  if (routing_.bad_ids() > 0) {
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(outcome.met.operation, XD_LL_DISPATCH);
    EXPECT_EQ(outcome.met.rank, routing_.bad_id_rank()) << outcome.text;
    EXPECT_TRUE(outcome.mentions(std::to_string(routing_.bad_ids()) + " expert ids"))
        << outcome.text;
  } else {
    ok(outcome);
  }
  EXPECT_EQ(outcome.group.bad_ids, routing_.bad_ids());
  Strided& counts = *field(XD_LL_DISPATCH, "counts").tensor;
  const std::vector<int>& experts = routing_.experts_of(rank_.rank);
  for (std::size_t l = 0; l < experts.size(); ++l) {
    counts.set(static_cast<std::int64_t>(l), routing_.rows(experts[l]).size());
  }
  counts.expect("counts");
  expect_rows();
  expect_plan();
  if (!case_.extras) return;
  Strided& load = *field(XD_LL_DISPATCH, "expert_load").tensor;
  for (std::size_t l = 0; l < experts.size(); ++l) {
    const auto e = static_cast<std::int64_t>(l);
    load.set(e, static_cast<std::uint64_t>(kFirstLoad + e) + routing_.rows(experts[l]).size());
  }
  load.expect("expert_load");
  expect_waits("wait_ns of dispatch", *field(XD_LL_DISPATCH, "wait_ns").tensor);
}

void LlBatch::expect_combined(const LlOutcome& outcome) {
  ok(outcome);
  const std::uint64_t salt =
      case_.weighs_combine() ? kCombineWeights + combines_ : kDispatchWeights;
  const ChoiceWeight weight_of = [&](int token, int k) {
    return weight(salt, rank_.rank, token, k);
  };
  const ResultRow result = [&](int expert, std::int64_t slot) { return result_row(expert, slot); };
  Strided& out = *field(XD_LL_COMBINE, "out").tensor;
  for (int t = 0; t < choices_.tokens; ++t) {
    out.set_row(t, 0,
                bytes_of(combined_row(routing_, rank_.hosts, rank_.rank, t,
                                      static_cast<std::size_t>(combine_columns_),
                                      format_of(case_.combine_dtype),
                                      {.result = result,
                                       .weight = weighted() ? &weight_of : nullptr,
                                       .one_per_rank = case_.receive == XD_LL_BY_RANK,
                                       .wire = case_.wire}),
                         case_.combine_dtype));
  }
  out.expect("out");
  if (case_.extras) {
    expect_waits("wait_ns of combine", *field(XD_LL_COMBINE, "wait_ns").tensor);
  }
}

}  // namespace xd::test
