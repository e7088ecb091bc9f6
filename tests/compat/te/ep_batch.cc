#include "compat/te/ep_batch.h"

#include <gtest/gtest.h>

#include <string>

namespace xd::test {

using crossdock::te::window;
using transformer_engine::TensorWrapper;

// A tensor of rows, and the window that it lies in.
struct TeBatch::Payload {
  TensorWrapper tensor;
  NVTECommWindow win{};
  bool given;

  Payload(const TeBatch& batch, const DLTensor* at) : tensor(te_tensor(at)), given(at != nullptr) {
    if (!given || !batch.by_windows) return;
    constexpr std::uint64_t kOffset = 16;
    win.window = window(static_cast<std::byte*>(at->data) - kOffset);
    win.offset = kOffset;
    static std::byte elsewhere;
    tensor.set_rowwise_data(&elsewhere, te_type(at->dtype), te_shape(*at));
  }
  NVTETensor data() const { return given ? tensor.data() : nullptr; }
};

TeBatch::TeBatch(const Rank& rank, const Case& c, Place place)
    : rank_(rank), batch_(rank, c, 0, place) {
  layer_.top_k = c.topk_of(0);
  layer_.dispatch_output_per_expert_alignment =
      static_cast<std::size_t>(batch_.routed().placement().alignment);
  batch_.prepare_args.alignment = batch_.routed().placement().alignment;
  batch_.prepare_args.counts = batch_.prepare_args.offsets = batch_.prepare_args.rank_rows =
      nullptr;
  batch_.combine_args.weights = nullptr;
  batch_.combine_bwd_args.expert_out = batch_.combine_bwd_args.weights = nullptr;
  batch_.combine_bwd_args.grad_weights = nullptr;
}

void TeBatch::use_group() {
  handle_ = Buffer(rank_, nvte_ep_handle_mem_size(&layer_), Place::ordinary);
  handle_.fill(kPoison);
}

TensorWrapper TeBatch::handle() const {
  return TensorWrapper(handle_.data(), std::vector<size_t>{handle_.bytes()},
                       transformer_engine::DType::kByte);
}

void TeBatch::prepare() {
  const TensorWrapper idx = te_tensor(batch_.prepare_args.topk_idx);
  const TensorWrapper counts = te_tensor(batch_.prepare_args.padded_counts);
  const TensorWrapper total = te_tensor(batch_.prepare_args.total);
  nvte_ep_prepare(handle().data(), idx.data(), counts.data(), total.data(), &layer_,
                  rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::dispatch() {
  const TensorWrapper idx = te_tensor(batch_.prepare_args.topk_idx);
  const Payload tokens(*this, batch_.dispatch_args.tokens);
  const Payload weights(*this, batch_.dispatch_args.topk_weights);
  const Payload recv(*this, batch_.dispatch_args.recv_tokens);
  const Payload recv_weights(*this, batch_.dispatch_args.recv_weights);
  nvte_ep_dispatch(handle().data(), idx.data(), tokens.data(), tokens.win, weights.data(),
                   weights.win, recv.data(), recv.win, recv_weights.data(), recv_weights.win,
                   rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::prepare_and_dispatch() {
  const TensorWrapper idx = te_tensor(batch_.prepare_args.topk_idx);
  const TensorWrapper counts = te_tensor(batch_.prepare_args.padded_counts);
  const TensorWrapper total = te_tensor(batch_.prepare_args.total);
  const Payload tokens(*this, batch_.dispatch_args.tokens);
  const Payload weights(*this, batch_.dispatch_args.topk_weights);
  const Payload recv(*this, batch_.dispatch_args.recv_tokens);
  const Payload recv_weights(*this, batch_.dispatch_args.recv_weights);
  nvte_ep_prepare_and_dispatch(handle().data(), idx.data(), tokens.data(), tokens.win,
                               weights.data(), weights.win, recv.data(), recv.win,
                               recv_weights.data(), recv_weights.win, counts.data(), total.data(),
                               &layer_, rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::combine() {
  const Payload rows(*this, batch_.combine_args.expert_out);
  const TensorWrapper out = te_tensor(batch_.combine_args.out);
  nvte_ep_combine(handle().data(), rows.data(), rows.win, out.data(), rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::dispatch_bwd() {
  const Payload rows(*this, batch_.dispatch_bwd_args.grad_recv_tokens);
  const Payload weights(*this, batch_.dispatch_bwd_args.grad_recv_weights);
  const TensorWrapper tokens = te_tensor(batch_.dispatch_bwd_args.grad_tokens);
  const TensorWrapper token_weights = te_tensor(batch_.dispatch_bwd_args.grad_topk_weights);
  nvte_ep_dispatch_bwd(handle().data(), rows.data(), rows.win, weights.data(), weights.win,
                       tokens.data(), token_weights.data(), rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::combine_bwd() {
  const Payload tokens(*this, batch_.combine_bwd_args.grad_out);
  const Payload rows(*this, batch_.combine_bwd_args.grad_expert_out);
  nvte_ep_combine_bwd(handle().data(), tokens.data(), tokens.win, rows.data(), rows.win,
                      rank_.stream());
  rank_.memory->synchronize();
}

void TeBatch::run_all() {
  prepare();
  dispatch();
  combine();
  combine_bwd();
  dispatch_bwd();
}

void TeBatch::run_all_directly(xd_comm* comm, const xd_ep_config& config) {
  const Group group = make_group(comm, config);
  for (const xd_ep_operation operation :
       {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD}) {
    ok(batch_.call(group.get(), operation));
  }
}

void TeBatch::expect_equal(TeBatch& direct) {
  for (Batch::Field& field : batch_.fields()) {
    const Tensor& other = *direct.batch_.field(field.operation, field.name).tensor;
    EXPECT_EQ(field.tensor->buffer().read(), other.buffer().read()) << field.name;
  }
  EXPECT_TRUE(batch_.guards_intact());
  EXPECT_TRUE(handle_.guards_intact());
}

NVTEEpGroupConfig te_config(const xd_ep_config& config) {
  NVTEEpGroupConfig te = NVTE_EP_GROUP_CONFIG_INIT;
  te.ep_size = config.num_ranks;
  te.num_experts = config.num_experts;
  te.max_tokens_per_rank = config.max_tokens_per_rank;
  std::int64_t bound = 0;
  ok(xd_ep_recv_bound(&config, &bound));
  te.max_recv_tokens_per_rank =
      static_cast<int>(config.recv_capacity != 0 ? config.recv_capacity : bound);
  te.hidden_dim = config.hidden;
  te.num_comm_sms = config.num_sms;
  te.max_token_dtype = static_cast<NVTEDType>(te_type(config.dtype));
  te.zero_copy = config.staging == XD_EP_STAGING_NONE;
  te.num_topk = config.max_topk;
  te.drop_on_overflow = config.overflow == XD_EP_OVERFLOW_DROP;
  return te;
}

}  // namespace xd::test
