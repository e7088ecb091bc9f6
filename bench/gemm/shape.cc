#include "shape.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>

namespace bench {
namespace {

// Sizes of all ranks together. Attention has heads of 128 columns, of which keys and values have 8
// each.
struct Model {
  const char* name;
  std::int64_t hidden, inner;
  std::int64_t qkv() const { return hidden + std::int64_t{2} * 8 * 128; }
};
constexpr std::array kModels{Model{"70b", 8192, 28672}, Model{"8b", 4096, 14336}};
constexpr std::array kOperations{XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER, XD_GEMM_ALL_REDUCE};

std::vector<GemmShape> layers_of(const Model& model, int ranks) {
  const std::string name = std::string(model.name) + ".";
  const std::int64_t hidden = model.hidden, inner = model.inner;
  for (const std::int64_t whole : {hidden, inner, model.qkv()}) {
    if (whole % ranks != 0) {
      throw std::invalid_argument("--shapes " + std::string(model.name) + ": " +
                                  std::to_string(whole) + " columns cannot be spread over " +
                                  std::to_string(ranks) + " ranks equally");
    }
  }
  // Column-parallel layers have their part of N, row-parallel ones their part of K.
  return {{name + "qkv", XD_GEMM_ALL_GATHER, model.qkv() / ranks, hidden},
          {name + "o_proj", XD_GEMM_REDUCE_SCATTER, hidden, hidden / ranks},
          {name + "fc1", XD_GEMM_ALL_GATHER, inner / ranks, hidden},
          {name + "fc2", XD_GEMM_REDUCE_SCATTER, hidden, inner / ranks},
          {name + "fc2_all_reduce", XD_GEMM_ALL_REDUCE, hidden, inner / ranks}};
}

// Reads all of `text`; false if it is no number from 1 on.
bool read_number(const std::string& text, std::int64_t& number) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, number);
  return error == std::errc() && stop == end && number >= 1 && number <= 1 << 24;
}

// Reads OPERATION:NxK; false if it is none.
bool read_sizes(const std::string& text, GemmShape& shape) {
  const std::size_t colon = text.find(':'), by = text.find('x', std::min(colon, text.size()));
  if (colon == std::string::npos || by == std::string::npos) return false;
  const auto* const found = std::ranges::find_if(
      kOperations, [&](xd_gemm_operation one) { return text.substr(0, colon) == name_of(one); });
  if (found == kOperations.end()) return false;
  shape = {.name = text, .operation = *found, .n = 0, .k = 0};
  return read_number(text.substr(colon + 1, by - colon - 1), shape.n) &&
         read_number(text.substr(by + 1), shape.k);
}

}  // namespace

std::vector<GemmShape> read_shapes(const std::string& text, int ranks) {
  GemmShape shape;
  if (read_sizes(text, shape)) return {shape};
  std::vector<GemmShape> found;
  for (const Model& model : kModels) {
    if (text.substr(0, text.find('.')) != model.name) continue;
    for (const GemmShape& layer : layers_of(model, ranks)) {
      if (text == model.name || text == layer.name) found.push_back(layer);
    }
  }
  if (found.empty()) {
    throw std::invalid_argument(
        "--shapes: expected 70b or 8b, one of their layers (70b.qkv, .o_proj, .fc1, .fc2, "
        ".fc2_all_reduce), or all_gather:NxK, reduce_scatter:NxK, all_reduce:NxK; got '" +
        text + "'");
  }
  return found;
}

const char* name_of(xd_gemm_operation operation) {
  switch (operation) {
    case XD_GEMM_ALL_GATHER:
      return "all_gather";
    case XD_GEMM_REDUCE_SCATTER:
      return "reduce_scatter";
    case XD_GEMM_ALL_REDUCE:
      return "all_reduce";
    default:
      return "?";
  }
}

}  // namespace bench
