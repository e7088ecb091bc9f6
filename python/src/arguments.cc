#include "arguments.h"

#include <nanobind/stl/string.h>

namespace xdpy {

void expected(const char* name, const char* what, nb::handle value) {
  const std::string got = nb::cast<std::string>(nb::repr(value));
  throw nb::type_error((std::string(name) + ": expected " + what + ", got " + got).c_str());
}

DLDataType data_type(int packed) {
  return {static_cast<std::uint8_t>(packed >> 8), static_cast<std::uint8_t>(packed & 0xff), 1};
}

Tensor::Tensor(nb::handle spec, const char* name, DLDevice device) {
  if (spec.is_none()) return;
  const Py_ssize_t parts = PyTuple_Check(spec.ptr()) ? PyTuple_GET_SIZE(spec.ptr()) : 0;
  if (parts != 3 && parts != 4) {
    expected(name, "None, (address, shape, dtype) or (address, shape, dtype, strides)", spec);
  }
  const nb::handle shape = PyTuple_GET_ITEM(spec.ptr(), 1);
  if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) > Py_ssize_t(max_dims)) {
    expected(name, "a shape of at most 4 dimensions", shape);
  }
  tensor_.data = pointer(integer<std::uint64_t>(PyTuple_GET_ITEM(spec.ptr(), 0), name));
  tensor_.ndim = static_cast<int>(PyTuple_GET_SIZE(shape.ptr()));
  for (int d = 0; d < tensor_.ndim; ++d) {
    shape_[d] = integer<std::int64_t>(PyTuple_GET_ITEM(shape.ptr(), d), name);
  }
  tensor_.shape = shape_.data();
  if (parts == 4) {
    const nb::handle strides = PyTuple_GET_ITEM(spec.ptr(), 3);
    if (!PyTuple_Check(strides.ptr()) || PyTuple_GET_SIZE(strides.ptr()) != tensor_.ndim) {
      expected(name, "as many strides as the shape has dimensions", strides);
    }
    for (int d = 0; d < tensor_.ndim; ++d) {
      strides_[d] = integer<std::int64_t>(PyTuple_GET_ITEM(strides.ptr(), d), name);
    }
    tensor_.strides = strides_.data();
  }
  tensor_.dtype = data_type(integer<std::int32_t>(PyTuple_GET_ITEM(spec.ptr(), 2), name));
  tensor_.device = device;
  given_ = true;
}

std::vector<std::int32_t> ranks_of_experts(nb::handle sequence, int num_experts) {
  std::vector<std::int32_t> ranks;
  if (sequence.is_none()) return ranks;
  if (!PySequence_Check(sequence.ptr())) {
    expected("expert_ranks", "a sequence with the rank of each expert", sequence);
  }
  for (const nb::handle rank : nb::cast<nb::sequence>(sequence)) {
    ranks.push_back(integer<std::int32_t>(rank, "expert_ranks"));
  }
  if (ranks.empty() || ranks.size() != static_cast<std::size_t>(std::max(num_experts, 0))) {
    throw nb::value_error(
        ("expert_ranks: expected the ranks of num_experts = " + std::to_string(num_experts) +
         " experts, got " + std::to_string(ranks.size()))
            .c_str());
  }
  return ranks;
}

namespace {

// Sets a field that configs of both kinds of groups have; false if `name` is none of these.
template <class Config>
bool set_common(Config& config, const std::string& name, nb::handle value) {
  const auto number = [&] { return integer<std::int32_t>(value, name.c_str()); };
  if (name == "num_ranks")
    config.num_ranks = number();
  else if (name == "num_experts")
    config.num_experts = number();
  else if (name == "max_topk")
    config.max_topk = number();
  else if (name == "max_tokens_per_rank")
    config.max_tokens_per_rank = number();
  else if (name == "hidden")
    config.hidden = number();
  else if (name == "dtype")
    config.dtype = data_type(number());
  else if (name == "duplicate_ids")
    config.duplicate_ids = static_cast<xd_ep_duplicate_ids>(number());
  else if (name == "on_error")
    config.on_error = static_cast<xd_ep_on_error>(number());
  else if (name == "num_sms")
    config.num_sms = number();
  else if (name == "device_type")
    config.device_type = number();
  else
    return false;
  return true;
}

bool set_own(xd_ep_config& config, const std::string& name, nb::handle value) {
  const auto number = [&] { return integer<std::int32_t>(value, name.c_str()); };
  if (name == "max_scale_bytes")
    config.max_scale_bytes = number();
  else if (name == "layout")
    config.layout = static_cast<xd_ep_layout>(number());
  else if (name == "alignment")
    config.alignment = number();
  else if (name == "recv_capacity")
    config.recv_capacity = integer<std::int64_t>(value, "recv_capacity");
  else if (name == "overflow")
    config.overflow = static_cast<xd_ep_overflow>(number());
  else if (name == "staging")
    config.staging = static_cast<xd_ep_staging>(number());
  else if (name == "zero_tail")
    config.zero_tail = number();
  else if (name == "net_buffer_bytes")
    config.net_buffer_bytes = integer<std::int64_t>(value, "net_buffer_bytes");
  else
    return false;
  return true;
}

bool set_own(xd_ll_config& config, const std::string& name, nb::handle value) {
  const auto number = [&] { return integer<std::int32_t>(value, name.c_str()); };
  if (name == "in_flight")
    config.in_flight = number();
  else if (name == "on_peer_loss")
    config.on_peer_loss = static_cast<xd_ll_peer_loss>(number());
  else if (name == "wait_timeout_ms")
    config.wait_timeout_ms = number();
  else
    return false;
  return true;
}

template <class Config>
ConfigWithExperts<Config> config_from(Config config, const nb::kwargs& options) {
  nb::object expert_ranks = nb::none();
  for (auto [key, value] : options) {
    const std::string name = nb::cast<std::string>(key);
    if (name == "expert_ranks") {
      expert_ranks = nb::borrow(value);
    } else if (!set_common(config, name, value) && !set_own(config, name, value)) {
      throw nb::type_error(("unknown option of a group: " + name).c_str());
    }
  }
  return {config, ranks_of_experts(expert_ranks, config.num_experts)};
}

}  // namespace

GroupConfig group_config(const nb::kwargs& options) {
  return config_from(xd_ep_config XD_EP_CONFIG_INIT, options);
}

LlGroupConfig ll_group_config(const nb::kwargs& options) {
  return config_from(xd_ll_config XD_LL_CONFIG_INIT, options);
}

namespace {

// The ranks whose bits are set, in a tuple.
nb::tuple ranks_of(const std::uint64_t (&bits)[2]) {
  nb::list ranks;
  for (int rank = 0; rank < 128; ++rank) {
    if ((bits[rank / 64] >> (rank % 64) & 1) != 0) ranks.append(rank);
  }
  return nb::tuple(ranks);
}

template <class Status>
nb::dict common_fields_of(const Status& status) {
  nb::dict found;
  found["status"] = xd_status_name(status.status);
  found["operation"] = static_cast<int>(status.operation);
  found["epoch"] = status.epoch;
  found["rank"] = status.rank;
  found["bad_ids"] = status.bad_ids;
  found["text"] = status.text;
  return found;
}

}  // namespace

nb::dict fields_of(const xd_ep_status& status) {
  nb::dict found = common_fields_of(status);
  found["needed_rows"] = status.needed_rows;
  found["capacity_rows"] = status.capacity_rows;
  found["dropped_rows"] = status.dropped_rows;
  return found;
}

nb::dict fields_of(const xd_ll_status& status) {
  nb::dict found = common_fields_of(status);
  found["masked"] = ranks_of(status.masked);
  found["masked_by"] = ranks_of(status.masked_by);
  return found;
}

}  // namespace xdpy
