#include "gemm_args.h"

#include <string>
#include <string_view>

namespace xdpy {
namespace {

struct TensorField {
  std::string_view name;
  const DLTensor* xd_gemm_args::*field;
};
constexpr std::array kTensors = {TensorField{"a", &xd_gemm_args::a},
                                 TensorField{"b", &xd_gemm_args::b},
                                 TensorField{"d", &xd_gemm_args::d},
                                 TensorField{"c", &xd_gemm_args::c},
                                 TensorField{"bias", &xd_gemm_args::bias},
                                 TensorField{"pre_activation", &xd_gemm_args::pre_activation},
                                 TensorField{"bias_grad", &xd_gemm_args::bias_grad},
                                 TensorField{"a_scale", &xd_gemm_args::a_scale},
                                 TensorField{"b_scale", &xd_gemm_args::b_scale},
                                 TensorField{"d_scale", &xd_gemm_args::d_scale},
                                 TensorField{"d_amax", &xd_gemm_args::d_amax},
                                 TensorField{"gathered", &xd_gemm_args::gathered},
                                 TensorField{"gathered_scale", &xd_gemm_args::gathered_scale}};

struct FlagField {
  std::string_view name;
  std::int32_t xd_gemm_args::*field;
};
constexpr std::array kFlags = {FlagField{"transpose_a", &xd_gemm_args::transpose_a},
                               FlagField{"transpose_b", &xd_gemm_args::transpose_b},
                               FlagField{"reduce_bias_grad", &xd_gemm_args::reduce_bias_grad},
                               FlagField{"fast_accumulate", &xd_gemm_args::fast_accumulate},
                               FlagField{"allow_tf32", &xd_gemm_args::allow_tf32}};

float real_number(nb::handle value, const char* name) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    expected(name, "a number", value);
  }
  return static_cast<float>(number);
}

const char* key_of(nb::handle key) {
  const char* const name = PyUnicode_AsUTF8(key.ptr());
  if (name == nullptr) throw nb::python_error();
  return name;
}

}  // namespace

void TokensPerRank::read(nb::handle sequence, int num_ranks) {
  if (sequence.is_none()) return;
  if (!PySequence_Check(sequence.ptr())) {
    expected("tokens_per_rank", "a sequence with the tokens of each rank", sequence);
  }
  for (const nb::handle tokens : nb::cast<nb::sequence>(sequence)) {
    tokens_.push_back(integer<std::int64_t>(tokens, "tokens_per_rank"));
  }
  if (tokens_.size() != static_cast<std::size_t>(num_ranks)) {
    throw nb::value_error(("tokens_per_rank: expected the tokens of " + std::to_string(num_ranks) +
                           " ranks, got " + std::to_string(tokens_.size()))
                              .c_str());
  }
  given_ = true;
}

GemmArgs::GemmArgs(const nb::dict& given, DLDevice device, int num_ranks) {
  static_assert(kTensors.size() <= most_tensors);
  for (auto [key, value] : given) {
    const char* const name = key_of(key);
    if (read_tensor(name, value, device) || read_number(name, value)) continue;
    if (std::string_view(name) == "tokens_per_rank") {
      tokens_.read(value, num_ranks);
      args_.tokens_per_rank = tokens_.get();
    } else if (std::string_view(name) != "stream") {
      throw nb::type_error((std::string("unknown argument of a product: ") + name).c_str());
    }
  }
}

bool GemmArgs::read_tensor(const char* name, nb::handle value, DLDevice device) {
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    if (kTensors[i].name != name) continue;
    args_.*kTensors[i].field = tensors_[i].emplace(value, name, device).get();
    return true;
  }
  return false;
}

bool GemmArgs::read_number(const char* name, nb::handle value) {
  for (const FlagField& flag : kFlags) {
    if (flag.name != name) continue;
    args_.*flag.field = integer<std::int32_t>(value, name);
    return true;
  }
  const std::string_view known = name;
  if (known == "alpha") {
    args_.alpha = real_number(value, name);
  } else if (known == "beta") {
    args_.beta = real_number(value, name);
  } else if (known == "epilogue") {
    args_.epilogue = static_cast<xd_gemm_epilogue>(integer<std::int32_t>(value, name));
  } else if (known == "algo") {
    args_.algo = static_cast<xd_gemm_algo>(integer<std::int32_t>(value, name));
  } else if (known == "tag") {
    args_.tag = integer<std::uint32_t>(value, name);
  } else {
    return false;
  }
  return true;
}

xd_gemm_config gemm_config(const nb::kwargs& options) {
  xd_gemm_config config XD_GEMM_CONFIG_INIT;
  for (auto [key, value] : options) {
    const char* const given = key_of(key);
    const std::string_view name = given;
    const auto number = [&, item = value] { return integer<std::int32_t>(item, given); };
    const auto size = [&, item = value] { return integer<std::int64_t>(item, given); };
    if (name == "num_ranks")
      config.num_ranks = number();
    else if (name == "operations")
      config.operations = number();
    else if (name == "max_tokens")
      config.max_tokens = size();
    else if (name == "max_k")
      config.max_k = size();
    else if (name == "max_n")
      config.max_n = size();
    else if (name == "dtype")
      config.dtype = data_type(number());
    else if (name == "algo")
      config.algo = static_cast<xd_gemm_algo>(number());
    else if (name == "num_comm_sms")
      config.num_comm_sms = number();
    else if (name == "keep_gathered")
      config.keep_gathered = number();
    else if (name == "allow_fallback")
      config.allow_fallback = number();
    else if (name == "nccl_comm")
      config.nccl_comm = pointer(integer<std::uintptr_t>(value, given));
    else if (name == "device_type")
      config.device_type = number();
    else
      throw nb::type_error((std::string("unknown option of a context: ") + given).c_str());
  }
  return config;
}

nb::dict fields_of(const xd_gemm_status& status) {
  nb::dict found;
  found["status"] = xd_status_name(status.status);
  found["operation"] = static_cast<int>(status.operation);
  found["epoch"] = status.epoch;
  found["rank"] = status.rank;
  found["text"] = status.text;
  return found;
}

nb::dict fields_of(const xd_gemm_plan_info& info) {
  nb::dict fields;
  fields["algo"] = static_cast<int>(info.algo);
  fields["num_products"] = info.num_products;
  fields["same_bits"] = info.same_bits;
  fields["estimate_us"] = info.estimate_us;
  fields["gemm_us"] = info.gemm_us;
  fields["transfer_us"] = info.transfer_us;
  fields["text"] = info.text;
  return fields;
}

}  // namespace xdpy
