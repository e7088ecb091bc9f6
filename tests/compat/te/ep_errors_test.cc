// Mistakes in calls of TransformerEngine's functions: exceptions here, and errors at once there.
#include <crossdock/compat/te_ep.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>

#include "compat/te/ep_batch.h"
#include "compat/te/errors.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using crossdock::te::as_nccl;

Thrown initialize(xd_comm* comm, const NVTEEpGroupConfig& config) {
  return thrown_by([&] { const TeGroup group(as_nccl(comm), config); });
}

TEST(TeEpConfig, OfAGroupThatIsWrongIsRefusedOnEveryRankWithItsField) {
  struct Mistake {
    const char* text;
    std::function<void(NVTEEpGroupConfig&)> make;
  };
  const Mistake mistakes[] = {
      {"group_config.struct_size = 8", [](NVTEEpGroupConfig& c) { c.struct_size = 8; }},
      {"group_config.max_recv_tokens_per_rank = -1",
       [](NVTEEpGroupConfig& c) { c.max_recv_tokens_per_rank = -1; }},
      {"group_config.zero_copy = 1",
       [](NVTEEpGroupConfig& c) { c.max_recv_tokens_per_rank = 0, c.zero_copy = 1; }},
      {"group_config.drop_on_overflow = 1",
       [](NVTEEpGroupConfig& c) { c.max_recv_tokens_per_rank = 0, c.drop_on_overflow = 1; }},
      {"group_config.num_topk = 0",
       [](NVTEEpGroupConfig& c) { c.max_recv_tokens_per_rank = 0, c.num_topk = 0; }},
      {"group_config.ep_size = 0", [](NVTEEpGroupConfig& c) { c.ep_size = 0; }},
      {"config.num_ranks = 1000", [](NVTEEpGroupConfig& c) { c.ep_size = 1000; }},
      {"config.num_experts = -4", [](NVTEEpGroupConfig& c) { c.num_experts = -4; }},
      {"config.max_tokens_per_rank = 0", [](NVTEEpGroupConfig& c) { c.max_tokens_per_rank = 0; }},
      {"config.hidden = 0", [](NVTEEpGroupConfig& c) { c.hidden_dim = 0; }},
      {"config.hidden = 3", [](NVTEEpGroupConfig& c) { c.hidden_dim = 3; }},
      {"config.num_sms = -1", [](NVTEEpGroupConfig& c) { c.num_comm_sms = -1; }},
      {"config.max_topk = 33", [](NVTEEpGroupConfig& c) { c.num_topk = 33; }},
      {"group_config.max_token_dtype: NVTEDType 1",
       [](NVTEEpGroupConfig& c) { c.max_token_dtype = kNVTEInt16; }},
      {"config.dtype = int32", [](NVTEEpGroupConfig& c) { c.max_token_dtype = kNVTEInt32; }},
  };
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    for (const Mistake& mistake : mistakes) {
      NVTEEpGroupConfig config = te_config(c.config(rank.rank));
      mistake.make(config);
      expect_error(initialize(rank.comm, config), XD_ERROR_INVALID_ARGUMENT, mistake.text);
    }
    expect_error(initialize(nullptr, te_config(c.config(rank.rank))), XD_ERROR_INVALID_ARGUMENT,
                 "comm");
    expect_error(thrown_by([&] { nvte_ep_initialize(as_nccl(rank.comm), nullptr); }),
                 XD_ERROR_INVALID_ARGUMENT, "group_config = NULL");
    const NVTEEpGroupConfig good = te_config(c.config(rank.rank));
    expect_error(thrown_by([&] { nvte_ep_initialize(nullptr, &good); }), XD_ERROR_INVALID_ARGUMENT,
                 "comm = NULL");
  });
}

// A caller of a newer header, with fields that are not known here.
TEST(TeEpConfig, MayBeLongerIfWhatIsUnknownIsZero) {
  struct Longer {
    NVTEEpGroupConfig known;
    int more[4];
  };
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    Longer longer{te_config(c.config(rank.rank)), {}};
    longer.known.struct_size = sizeof(longer);
    EXPECT_EQ(initialize(rank.comm, longer.known).text, "");
    longer.more[2] = 1;
    expect_error(initialize(rank.comm, longer.known), XD_ERROR_INVALID_ARGUMENT,
                 "a field is set that this header does not know");
  });
}

TEST(TeEpConfig, ThatRanksDisagreeOnIsAMismatch) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    if (rank.rank == 0) config.num_topk = 2;
    expect_error(initialize(rank.comm, config), XD_ERROR_MISMATCH, "max_topk");
    EXPECT_EQ(crossdock::te::ep_comm(), nullptr);
  });
}

TEST(TeEpCalls, WithoutAGroupAreRefused) {
  on_every_rank([&](Rank&) {
    NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
    const NVTECommWindow none{};
    const std::function<void()> calls[] = {
        [&] { nvte_ep_handle_mem_size(&layer); },
        [&] { nvte_ep_prepare(nullptr, nullptr, nullptr, nullptr, &layer, nullptr); },
        [&] {
          nvte_ep_dispatch(nullptr, nullptr, nullptr, none, nullptr, none, nullptr, none, nullptr,
                           none, nullptr);
        },
        [&] {
          nvte_ep_prepare_and_dispatch(nullptr, nullptr, nullptr, none, nullptr, none, nullptr,
                                       none, nullptr, none, nullptr, nullptr, &layer, nullptr);
        },
        [&] { nvte_ep_combine(nullptr, nullptr, none, nullptr, nullptr); },
        [&] {
          nvte_ep_dispatch_bwd(nullptr, nullptr, none, nullptr, none, nullptr, nullptr, nullptr);
        },
        [&] { nvte_ep_combine_bwd(nullptr, nullptr, none, nullptr, none, nullptr); },
    };
    for (const auto& call : calls) {
      expect_error(thrown_by(call), XD_ERROR_INVALID_ARGUMENT, "call nvte_ep_initialize first");
    }
  });
}

TEST(TeEpCalls, ThatNeedNoPeersFailAloneAndTheGroupLives) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    const TeGroup group(as_nccl(rank.comm), config);
    expect_error(thrown_by([&] { nvte_ep_initialize(as_nccl(rank.comm), &config); }),
                 XD_ERROR_INVALID_ARGUMENT, "there is a group already");
    NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
    const auto size = [&] { nvte_ep_handle_mem_size(&layer); };
    expect_error(thrown_by(size), XD_ERROR_INVALID_ARGUMENT, "layer_cfg.top_k = 0");
    layer.top_k = 4;
    expect_error(thrown_by(size), XD_ERROR_INVALID_ARGUMENT,
                 "layer_cfg.top_k = 4, expected 1 to the group's 3");
    layer.top_k = 3;
    for (const std::size_t alignment : {std::size_t{3}, std::size_t{1} << 30}) {
      layer.dispatch_output_per_expert_alignment = alignment;
      expect_error(thrown_by(size), XD_ERROR_INVALID_ARGUMENT,
                   "alignment = " + std::to_string(alignment) + ", expected 0 or a power of two");
    }
    expect_error(thrown_by([&] { nvte_ep_handle_mem_size(nullptr); }), XD_ERROR_INVALID_ARGUMENT,
                 "layer_cfg = NULL");
    TeBatch batch(rank, c);
    batch.use_group();
    batch.run_all();
  });
}

// A mistake of rank 0 in an operation.
struct Mistake {
  const char* name;
  const char* text;
  std::function<void(const Rank&, TeBatch&)> make;
};

NVTEEpLayerConfig two_choices(const TeBatch& batch) {
  NVTEEpLayerConfig layer = batch.layer();
  layer.top_k = 2;
  return layer;
}

void prepare_by(const Rank& rank, TeBatch& batch, const NVTEEpLayerConfig& layer,
                NVTETensor handle) {
  const auto idx = te_tensor(batch.batch().prepare_args.topk_idx);
  nvte_ep_prepare(handle, idx.data(), nullptr, nullptr, &layer, rank.stream());
}

const Mistake kMistakes[] = {
    {"NoHandle", "plan = NULL",
     [](const Rank& rank, TeBatch& batch) { prepare_by(rank, batch, batch.layer(), nullptr); }},
    {"ShortHandle", "plan_bytes = 64",
     [](const Rank& rank, TeBatch& batch) {
       const transformer_engine::TensorWrapper handle(
           batch.handle().dptr(), std::vector<size_t>{64}, transformer_engine::DType::kByte);
       prepare_by(rank, batch, batch.layer(), handle.data());
     }},
    {"OtherTopK", "topk_idx: has 3 columns, expected top_k = 2",
     [](const Rank& rank, TeBatch& batch) {
       prepare_by(rank, batch, two_choices(batch), batch.handle().data());
     }},
    {"NoLayer", "layer_cfg = NULL",
     [](const Rank& rank, TeBatch& batch) {
       const auto idx = te_tensor(batch.batch().prepare_args.topk_idx);
       nvte_ep_prepare(batch.handle().data(), idx.data(), nullptr, nullptr, nullptr, rank.stream());
     }},
    {"NoIndices", "topk_idx = NULL",
     [](const Rank& rank, TeBatch& batch) {
       const NVTEEpLayerConfig layer = batch.layer();
       nvte_ep_prepare(batch.handle().data(), nullptr, nullptr, nullptr, &layer, rank.stream());
     }},
};

// GoogleTest's name of the instance.
void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }

class TeEpMistake : public testing::TestWithParam<Mistake> {};

TEST_P(TeEpMistake, IsThrownHereAndToldThePeersAtOnceAndAnotherGroupWorks) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    const Comm finished = rank.another_comm("finished", 0);
    nvte_ep_initialize(as_nccl(finished.get()), &config);
    TeBatch batch(rank, c);
    batch.use_group();
    const auto start = std::chrono::steady_clock::now();
    if (rank.rank == 0) {
      expect_error(thrown_by([&] { GetParam().make(rank, batch); }), XD_ERROR_INVALID_ARGUMENT,
                   GetParam().text);
    } else {
      expect_error(thrown_by([&] { batch.prepare(); }, [&] { batch.prepare(); }), XD_ERROR_MISMATCH,
                   "rank 0");
    }
    rank.memory->synchronize();  // on a device the rank's own turn may still be under way
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    // From now on all calls fail, and the reason stays known.
    EXPECT_NE(thrown_by([&] { batch.prepare(); }).status, XD_SUCCESS);
    EXPECT_NE(comm_error(crossdock::te::ep_comm()).status, XD_SUCCESS);
    nvte_ep_shutdown();
    nvte_ep_initialize(as_nccl(rank.comm), &config);
    TeBatch again(rank, c);
    again.use_group();
    again.run_all();
    nvte_ep_shutdown();
  });
}

INSTANTIATE_TEST_SUITE_P(All, TeEpMistake, testing::ValuesIn(kMistakes),
                         testing::PrintToStringParamName());

// Something wrong with the rows of dispatch on all ranks: each is told of its own.
void expect_refused_rows(const std::string& text, bool zero_copy,
                         const std::function<void(const Rank&, TeBatch&)>& dispatch) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    config.zero_copy = zero_copy ? 1 : 0;
    const Comm comm = rank.another_comm("refused", 0);
    const TeGroup group(as_nccl(comm.get()), config);
    TeBatch batch(rank, c);
    batch.use_group();
    batch.prepare();
    expect_error(thrown_by([&] { dispatch(rank, batch); }), XD_ERROR_INVALID_ARGUMENT, text);
    rank.memory->synchronize();
  });
}

void dispatch_rows(const Rank& rank, const TeBatch& batch, NVTETensor tokens, NVTETensor recv) {
  nvte_ep_dispatch(batch.handle().data(), nullptr, tokens, {}, nullptr, {}, recv, {}, nullptr, {},
                   rank.stream());
}

TEST(TeEpRows, OfFp8WithAScaleOfTheTensorAreRefused) {
  expect_refused_rows(
      "of fp8 rows, expected NVTE_MXFP8_1D_SCALING", false, [](const Rank& rank, TeBatch& batch) {
        Tensor tokens(rank, kE4m3, {4, 32}), recv(rank, kE4m3, {4, 32});
        dispatch_rows(rank, batch, te_tensor(tokens.dl()).data(), te_tensor(recv.dl()).data());
      });
}

TEST(TeEpRows, OfOtherScalingModesAreRefused) {
  expect_refused_rows("NVTEScalingMode 2", false, [](const Rank& rank, TeBatch& batch) {
    Tensor tokens(rank, kBf16, {4, 32});
    transformer_engine::TensorWrapper te(NVTE_BLOCK_SCALING_1D);
    te.set_rowwise_data(tokens.dl()->data, transformer_engine::DType::kBFloat16,
                        std::vector<size_t>{4, 32});
    dispatch_rows(rank, batch, te.data(), te.data());
  });
}

TEST(TeEpRows, OutsideSymmetricMemoryAreRefusedWithZeroCopy) {
  expect_refused_rows("lies outside symmetric memory", true,
                      [](const Rank&, TeBatch& batch) { batch.dispatch(); });
}

TEST(TeEpOverflow, IsThrownOnEveryRankWithItsNumbers) {
  Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    config.max_recv_tokens_per_rank = 4;
    const Comm comm = rank.another_comm("overflow", 0);
    const TeGroup group(as_nccl(comm.get()), config);
    TeBatch batch(rank, c);
    batch.use_group();
    expect_error(thrown_by([&] { batch.prepare(); }, [&] { batch.dispatch(); }), XD_ERROR_OVERFLOW,
                 "expected at most its recv_capacity = 4");
  });
}

}  // namespace
}  // namespace xd::test
