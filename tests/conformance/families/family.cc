#include "conformance/families/family.h"

#include <algorithm>
#include <utility>

#include "conformance/step.h"

namespace xd::test {
namespace {

std::pair<xd_status, std::string> with_text(xd_status status) { return {status, xd_last_error()}; }

template <class Field>
bool is_one_of(const Field& field, std::initializer_list<const char*> names) {
  return std::ranges::any_of(names,
                             [&](const char* name) { return field.name == std::string(name); });
}

bool on_the_cpu() { return world().memory().device().device_type == kDLCPU; }

// Damages that every operation refuses, and `besides` those of one family.
std::vector<Damage> all_damages(const std::vector<Damage>& besides) {
  std::vector<Damage> all(std::begin(kDamages), std::end(kDamages));
  all.insert(all.end(), besides.begin(), besides.end());
  return all;
}

}  // namespace

// ---- Bulk ---------------------------------------------------------------------------------------

std::vector<std::pair<xd_status, std::string>> Bulk::read_config(const Config& config) {
  std::size_t bytes = 0;
  std::int64_t rows = 0;
  xd_ep_memory memory = XD_EP_MEMORY_INIT;
  return {with_text(xd_ep_plan_size(&config, &bytes)), with_text(xd_ep_recv_bound(&config, &rows)),
          with_text(xd_ep_group_memory(&config, &memory))};
}

const char* Bulk::name(Operation operation) {
  constexpr const char* kNames[] = {"prepare", "dispatch", "combine", "dispatch_bwd",
                                    "combine_bwd"};
  return kNames[operation];
}

std::vector<Case> Bulk::full_cases() {
  Case c = plain();
  c.cargo = Cargo::e4m3_with_floats;
  std::vector<Case> cases{c, c};
  cases.back().layout = XD_EP_RANK_MAJOR;
  return cases;
}

// Dispatch may carry scales.
Group Bulk::make_roomy(const Rank& rank) {
  Case c = plain();
  c.cargo = Cargo::e4m3_with_floats;
  return make(rank, c);
}

void Bulk::make_plan(Batch& batch, Raw* group) {
  batch.prepare(group);
  batch.poison_outputs();
}

void Bulk::expect_nothing_written(Batch& batch, Operation operation) {
  EXPECT_TRUE(batch.untouched(operation)) << "an output was written";
  EXPECT_TRUE(batch.guards_intact());
}

void Bulk::expect_works(const Rank& rank, const Case& c, Raw* group) {
  Step(rank, c, group, 1).run_all();
}

std::vector<Damage> Bulk::damages() {
  return all_damages({
      {"Float8WithoutVariant",
       [](DamagedTensor& d) {
         d.tensor.dtype = {8, 8, 1};
       }},
      {"TooManyExtents", add_extent},
      {"NotContiguous", spread_out},
  });
}

bool Bulk::takes(const Batch::Field& field, const Damage& damage) {
  return is_one_of(field, {"scales"}) && damage.name == std::string("NotContiguous");
}

// Every other tensor is either needed itself, or by another that is given.
bool Bulk::may_be_missing(const Batch::Field& field) {
  return (field.operation == XD_EP_PREPARE && field.output) ||
         (field.operation == XD_EP_COMBINE && is_one_of(field, {"weights"})) ||
         is_one_of(field, {"recv_topk_idx", "grad_weights"});
}

// ---- LowLatency ---------------------------------------------------------------------------------

std::vector<std::pair<xd_status, std::string>> LowLatency::read_config(const Config& config) {
  std::size_t bytes = 0;
  xd_ll_memory memory = XD_LL_MEMORY_INIT;
  return {with_text(xd_ll_plan_size(&config, &bytes)),
          with_text(xd_ll_group_memory(&config, &memory))};
}

std::vector<LlCase> LowLatency::full_cases() {
  LlCase c = plain();
  c.row_units = 64;
  c.max_tokens = 5;
  c.sent = Sent::float_scales;
  c.weights = Weights::both;
  LlCase by_expert = c;
  by_expert.receive = XD_LL_BY_EXPERT;
  by_expert.alignment = 4;
  LlCase by_rank = c;
  by_rank.receive = XD_LL_BY_RANK;
  by_rank.weights = Weights::at_dispatch;
  LlCase given = c;
  given.sent = Sent::e4m3_and_floats;
  return {c, by_expert, by_rank, given};
}

// Rows of 128 columns, so that they may be quantised.
LlGroup LowLatency::make_roomy(const Rank& rank) {
  LlCase c = plain();
  c.row_units = 16;
  return make(rank, c);
}

void LowLatency::make_plan(Batch& batch, Raw* group) {
  batch.dispatch(group);
  batch.reset_tensors(XD_LL_DISPATCH);
}

xd_status LowLatency::enqueue(Batch& batch, Raw* group, Operation operation, Way way) {
  if (way == Way::whole) return batch.enqueue(group, operation);
  ok(batch.call(group, operation, XD_LL_PHASE_SEND));
  return batch.enqueue(group, operation, XD_LL_PHASE_RECEIVE);
}

void LowLatency::expect_nothing_written(Batch& batch, Operation operation) {
  EXPECT_EQ(batch.written(operation), "");
  batch.reset_tensors(operation);  // times
}

void LowLatency::expect_works(const Rank& rank, const Case& c, Raw* group) {
  LlBatch batch(rank, c, 7);
  batch.dispatch(group);
  batch.combine(group);
}

std::vector<Damage> LowLatency::damages() {
  return all_damages({
      {"TooManyExtents", add_extent},
      {"TooLong", [](DamagedTensor& d) { d.shape[0] += 100; }},
      {"EqualStrides", spread_out},
  });
}

bool LowLatency::may_be_missing(const Batch::Field& field) {
  return is_one_of(field, {"topk_weights", "source_ranges", "source_tokens", "expert_load",
                           "wait_ns", "recv_topk_idx"});
}

// Scales may lie anywhere. Rows that have no slots may be more than there must be.
bool LowLatency::takes(const Batch::Field& field, const Damage& damage) {
  if (is_one_of(field, {"scales"}) && damage.name == std::string("EqualStrides")) return true;
  return is_one_of(field, {"expert_out"}) && field.tensor->shape().size() == 2 &&
         damage.name == std::string("TooLong");
}

// ---- Products -----------------------------------------------------------------------------------

std::vector<std::pair<xd_status, std::string>> Products::read_config(const Config& config) {
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
  return {with_text(xd_gemm_context_memory(&config, &memory))};
}

std::vector<GemmCase> Products::full_cases() {
  std::vector<GemmCase> cases;
  for (const xd_gemm_operation operation : kOperations) {
    GemmCase& c = cases.emplace_back(plain(operation));
    c.tokens = TokenCounts::most;
    c.addend = Addend::added;
    c.bias = Bias::f32;
    c.epilogue = XD_GEMM_EPILOGUE_RELU;
    c.pre_activation = true;
    c.bias_grad = BiasGrad::own;
    c.amax = true;
    c.gathered = Gathered::given;
  }
  GemmCase c = cases.front();
  c.operands = Operands::e4m3;
  // CUDA devices take such blocks of some sizes alone.
  c.scaling = on_the_cpu() ? Scaling::block : Scaling::row;
  cases.push_back(c);
  c.result = Output::e4m3;
  c.bias_grad = BiasGrad::none;
  c.epilogue = XD_GEMM_EPILOGUE_DRELU;
  cases.push_back(c);
  return cases;
}

// Of all operations, and of elements as large as there are.
GemmContext Products::make_roomy(const Rank& rank) {
  xd_gemm_config config = plain().config();
  config.operations = 31;
  config.max_k = config.max_n = 256;
  config.dtype = kF32;
  return make_context(rank.comm, config);
}

void Products::expect_works(const Rank& rank, const Case& c, Raw* context) {
  for (int step = 0; step < 2; ++step) {
    GemmBatch batch(rank, c, step);
    ok(batch.call(context));
    batch.check(context);
  }
}

std::vector<Damage> Products::damages() {
  return all_damages({
      {"Integers",
       [](DamagedTensor& d) {
         d.tensor.dtype = {kDLInt, 32, 1};
       }},
      {"TooManyExtents",
       [](DamagedTensor& d) {
         d.tensor.ndim = 3;
         d.shape[1] = d.shape[2] = 1;
       }},
      {"TooLong", [](DamagedTensor& d) { d.shape[0] += 16; }, true},
      {"TooWide", [](DamagedTensor& d) { *d.last() += 16; }, true},
      {"NotContiguous", spread_out},
  });
}

bool Products::may_be_missing(const Batch::Field& field) {
  return !is_one_of(field, {"a", "b", "d"});
}

}  // namespace xd::test
