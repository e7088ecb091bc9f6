#include "conformance/step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "support/random.h"

namespace xd::test {
namespace {

// The byte in inputs where nothing may be read: it makes NaN in every floating-point type.
constexpr std::byte kForbidden{0xFF};

std::int64_t columns_of(const std::vector<std::int64_t>& shape) {
  return shape.size() > 1 ? shape[1] : 1;
}

}  // namespace

Step::Step(const Rank& rank, const Case& c, xd_ep_group* group, int number)
    : rank_(rank),
      case_(c),
      group_(group),
      number_(number),
      seed_(mix(c.seed, 0xBA7C4, static_cast<std::uint64_t>(number))),
      topk_(c.topk_of(number)),
      routed_(c.placement(number), c.choices(number)),
      row_units_(c.row_units) {
  const xd_ep_config config = c.config(rank.rank);
  plan_ = make_plan(rank, config);
  plan_.fill(kPoison);
  // Every other batch has rows that may be shorter than the group's.
  const int least = c.least_row_units();
  if (number % 2 == 1) {
    row_units_ = least + static_cast<int>(common_chance(1) %
                                          static_cast<std::uint64_t>(c.row_units - least + 1));
    if (c.wire > XD_EP_WIRE_FLOAT32) row_units_ -= row_units_ % least;  // whole blocks
  }
}

void Step::run_all() {
  prepare();
  dispatch();
  combine();
  combine_bwd();
  dispatch_bwd();
}

std::uint64_t Step::common_chance(std::uint64_t salt) const { return mix(seed_, 0xC4, salt); }

std::uint64_t Step::own_chance(std::uint64_t salt) const {
  return mix(seed_, 0x0E, salt, static_cast<std::uint64_t>(rank_.rank));
}

Element Step::element(Content content, int rank, std::int64_t row, std::int64_t column) const {
  return {seed_, content, rank, row, column};
}

float Step::weight(const Row& row, int k) const {
  return weight_value(element(Content::topk_weights, row.source, row.token, k));
}

float Step::weight_at(int rank, std::int64_t row) const {
  return weight_value(element(Content::weights, rank, row, 0));
}

std::int64_t Step::capacity() const { return routed_.placement().whole_capacity(rank_.rank); }

std::int64_t Step::receive_rows(std::uint64_t salt) const {
  const std::int64_t least = std::min(received().total, capacity());
  switch (case_.receive_rows) {
    case ReceiveRows::exact:
      return least;
    case ReceiveRows::capacity:
      return capacity();
    case ReceiveRows::more:
      return least + 1 + static_cast<std::int64_t>(own_chance(salt) % 9);
  }
  return least;
}

Step::Shape Step::choice_shape(std::int64_t rows) const {
  return case_.layout == XD_EP_EXPERT_MAJOR ? Shape{rows} : Shape{rows, topk_};
}

Spread Step::spread(Grain grain, const Shape& shape) const {
  Spread spread;
  if (grain == Grain::rows) return spread;
  const std::uint64_t chance = own_chance(tensors_ + 1000);
  spread.shift = static_cast<std::int64_t>(chance % 16);
  if (grain == Grain::elements) return spread;
  const std::int64_t rows = shape[0], columns = shape[1];
  const auto gap = static_cast<std::int64_t>(chance / 16 % 5);
  switch (chance / 128 % 6) {
    case 0:
      break;
    case 1:  // column after column
      spread.strides = {1, std::max<std::int64_t>(1, rows + gap)};
      break;
    case 2:  // part of a wider matrix
      spread.strides = {columns + gap, 1};
      break;
    case 3:  // every second element or so
      spread.strides = {(columns + gap) * (1 + gap), 1 + gap};
      break;
    case 4:  // rows from the last to the first
      spread.strides = {-(columns + gap), 1};
      break;
    default:  // columns likewise, one after another
      spread.strides = {1 + gap, -((rows + gap) * (1 + gap))};
      break;
  }
  return spread;
}

Tensor Step::output(DLDataType type, Shape shape, bool receive, Grain grain) {
  ++tensors_;
  const bool chosen = own_chance(tensors_) % 2 == 0;
  bool symmetric = case_.placing == Placing::symmetric;
  if (case_.placing == Placing::mixed) symmetric = chosen;
  if (case_.placing == Placing::unstaged) {
    symmetric = receive && (grain == Grain::rows || chosen);
  }
  Spread lie = spread(grain, shape);
  return Tensor(rank_, type, std::move(shape), symmetric ? Place::symmetric : Place::ordinary,
                std::move(lie));
}

Tensor Step::token_input(DLDataType type, Shape shape, const CodeAt& code, Grain grain) {
  Image image(shape[0], columns_of(shape), type, kForbidden);
  for (std::int64_t row = 0; row < image.rows(); ++row) image.set_row(row, code);
  Tensor tensor = output(type, std::move(shape), false, grain);
  tensor.write(image.bytes());
  return tensor;
}

Tensor Step::receive_input(DLDataType type, Shape shape, const CodeAt& code, Grain grain) {
  Tensor tensor = output(type, std::move(shape), true, grain);
  write_received(tensor, code);
  return tensor;
}

void Step::write_received(Tensor& tensor, const CodeAt& code) const {
  Image image(tensor.shape()[0], columns_of(tensor.shape()), tensor.type(), kForbidden);
  const std::int64_t used =
      std::min(image.rows(), static_cast<std::int64_t>(received().rows.size()));
  for (std::int64_t row = 0; row < used; ++row) {
    if (!row_at(row).padding() && (part_ == 0 || part_of(row) <= part_)) image.set_row(row, code);
  }
  tensor.write(image.bytes());
}

int Step::part_of(std::int64_t row) const {
  const std::vector<std::int64_t>& offsets = received().offsets;
  const auto experts = static_cast<int>(offsets.size()) - 1;
  int expert = 0;
  while (offsets[static_cast<std::size_t>(expert) + 1] <= row) ++expert;
  int part = 1;
  while (part * experts / case_.parts <= expert) ++part;
  return part;
}

void Step::expect_received(const char* name, const Tensor& tensor, const CodeAt& code) const {
  Image image(tensor.shape()[0], columns_of(tensor.shape()), tensor.type(), kPoison);
  const auto used = static_cast<std::int64_t>(received().rows.size());
  const std::vector<std::byte> got = before_last_part() ? tensor.read() : std::vector<std::byte>();
  for (std::int64_t row = 0; row < image.rows() && !routed_.refused(); ++row) {
    if (before_last_part() && (row >= used || part_of(row) > part_)) {
      if (row < used) image.take_row(row, got);
    } else if (row < used && !row_at(row).padding()) {
      image.set_row(row, code);
    } else if (row < used || case_.zeroes_tail(rank_.rank)) {
      image.fill_row(row, std::byte{0});
    }
  }
  expect_image(name, tensor, image);
}

void Step::expect_tokens(const char* name, const Tensor& tensor, const CodeAt& code) const {
  Image image(tokens(), columns_of(tensor.shape()), tensor.type(), kPoison);
  const bool written = !routed_.refused() && !before_last_part();
  for (std::int64_t row = 0; row < image.rows() && written; ++row) image.set_row(row, code);
  expect_image(name, tensor, image);
}

// RANK_MAJOR: local expert or weight of each choice that is here, else -1 or 0; also past the last
// row, whether or not the group zeroes tails.
void Step::expect_choices(const char* name, const Tensor& tensor, ChoiceField field) const {
  const bool weights = field == ChoiceField::weight;
  Image image(tensor.shape()[0], topk_, tensor.type(), kPoison);
  for (std::int64_t r = 0; r < image.rows() && !routed_.refused(); ++r) {
    image.fill_row(r, weights ? std::byte{0} : std::byte{0xFF});
    if (r >= static_cast<std::int64_t>(received().rows.size())) continue;
    for (int k = 0; k < topk_; ++k) {
      const std::int64_t id = routed_.choices(row_at(r).source).id(row_at(r).token, k);
      if (id < 0 || routed_.owner(id) != rank_.rank) continue;
      image.set(r, k,
                weights ? encode(weight(row_at(r), k), kFormatF32)
                        : static_cast<std::uint64_t>(routed_.local_expert(id)));
    }
  }
  expect_image(name, tensor, image);
}

// Throws where an operation did not end as it must, so that all ranks start afresh.
void Step::expect_status(xd_ep_operation operation, xd_status called) {
  const Outcome outcome = finish(rank_, group_, called);
  reported_drops_ += outcome.group.dropped_rows;
  const bool bad_ids = operation == XD_EP_PREPARE && routed_.bad_ids() > 0;
  const xd_status expected = routed_.refused() ? XD_ERROR_OVERFLOW
                             : bad_ids         ? XD_ERROR_INVALID_ARGUMENT
                                               : XD_SUCCESS;
  if (outcome == expected) {
    if (operation == XD_EP_PREPARE) {
      EXPECT_EQ(outcome.group.unplaced_choices, case_.unplaced(number_, rank_.rank));
    }
    return;
  }
  ok(outcome);
  throw std::runtime_error("operation " + std::to_string(operation) + " succeeded, expected " +
                           xd_status_name(expected));
}

}  // namespace xd::test
