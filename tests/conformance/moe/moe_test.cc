// A layer as one call: the bits of the calls that it is made of, by every schedule, and errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/moe/layer.h"
#include "conformance/random_delay.h"
#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

bool on_devices() { return world().memory().device().device_type == kDLCUDA; }

// A case, and a batch with its plan.
struct Scene {
  Scene(const Rank& of, const Case& of_case, xd_ep_staging staging = XD_EP_STAGING_AUTO,
        int num_sms = 0)
      : rank(of), c(of_case), batch(of, of_case) {
    xd_ep_config config = c.config(rank.rank);
    config.staging = staging;
    config.num_sms = num_sms;
    group = make_group(rank.comm, config);
    batch.prepare_args.parts = c.parts;
    batch.prepare(group.get());
  }

  const Rank& rank;
  const Case c;
  Group group;
  Batch batch;
};

void on_scenes(const Case& c, const std::function<void(Scene&)>& body) {
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", " + c.description());
    Scene scene(rank, c);
    body(scene);
  });
}

std::vector<int> plans_parts() { return {1, 2, 3, 5, 16}; }

// Both schedules of a plan.
std::vector<int> schedules(const Case& c) { return {0, c.parts}; }

void expect_bits_of_the_calls(Scene& s, const Layer::Options& options) {
  Layer by_calls(s.rank, s.c, s.batch, options);
  by_calls.forward_by_calls(s.group.get());
  by_calls.backward_by_calls(s.group.get());
  for (const int parts : schedules(s.c)) {
    for (const int num_sms : {0, 2}) {
      SCOPED_TRACE("parts " + std::to_string(parts) + ", num_sms " + std::to_string(num_sms));
      Layer layer(s.rank, s.c, s.batch, options);
      ok(layer.forward(s.group.get(), parts, num_sms));
      ok(layer.backward(s.group.get(), parts, num_sms));
      layer.expect_equal(by_calls);
    }
  }
}

TEST(Moe, HasTheBitsOfItsCallsInAnyNumberOfParts) {
  for (const int parts : plans_parts()) {
    on_scenes(layer_case(world().num_ranks(), parts), [](Scene& s) {
      expect_bits_of_the_calls(s, {});
      expect_bits_of_the_calls(s, {.weighted = false});
    });
  }
}

TEST(Moe, HasThemWithZonesAndRanksThatAreEmpty) {
  std::vector<Case> cases;
  for (const Pattern pattern : {Pattern::one_hot, Pattern::empty_ranks, Pattern::holes,
                                Pattern::nobody, Pattern::one_rank}) {
    for (const Tokens tokens : {Tokens::some_zero, Tokens::differ}) {
      cases.push_back(layer_case(world().num_ranks(), 3));
      cases.back().pattern = pattern;
      cases.back().tokens = tokens;
    }
  }
  cases.push_back(layer_case(world().num_ranks(), 2));
  cases.back().tokens = Tokens::all_zero;
  for (const Case& c : cases) {
    on_scenes(c, [](Scene& s) { expect_bits_of_the_calls(s, {}); });
  }
}

// Frameworks give no memory to tensors without elements.
TEST(Moe, HasThemWhereTensorsWithoutRowsAreNull) {
  Case c = layer_case(world().num_ranks(), 1);
  c.pattern = Pattern::nobody;
  on_scenes(c, [](Scene& s) {
    Layer by_calls(s.rank, s.c, s.batch, {}), layer(s.rank, s.c, s.batch, {});
    by_calls.forward_by_calls(s.group.get());
    by_calls.backward_by_calls(s.group.get());
    std::deque<DLTensor> nulls;  // it never moves its elements
    for (const Layer::Field& field : layer.fields()) {
      if (*field.slot == nullptr || (*field.slot)->shape[0] != 0) continue;
      nulls.push_back(**field.slot);
      nulls.back().data = nullptr;
      nulls.back().byte_offset = 0;
      *field.slot = &nulls.back();
    }
    EXPECT_GE(nulls.size(), 5u);
    ok(layer.forward(s.group.get(), s.c.parts));
    ok(layer.backward(s.group.get(), s.c.parts));
    layer.expect_equal(by_calls);
  });
}

TEST(Moe, HasThemWhereRowsAreDroppedAndExpertsLieAnywhere) {
  std::vector<Case> cases;
  for (const Homes homes : {Homes::interleaved, Homes::ragged, Homes::one_without}) {
    Case c = layer_case(world().num_ranks(), 2);
    if (homes == Homes::one_without && c.num_ranks == 1) continue;
    c.settle(homes);
    for (int rank = 0; rank < c.num_ranks; ++rank) {
      c.parts = std::clamp(c.local_experts_of(rank), 1, c.parts);
    }
    cases.push_back(c);
    c.capacity = Capacity::dropping;
    cases.push_back(c);
  }
  for (const Case& c : cases) {
    on_scenes(c, [](Scene& s) { expect_bits_of_the_calls(s, {}); });
  }
}

// The same tensors, batch after batch, while each rank is late now and then.
TEST(Moe, HasThemWithOtherRoutingAndRanksOutOfStep) {
  on_scenes(layer_case(world().num_ranks(), 3), [](Scene& s) {
    Random delays(mix(s.c.seed, 0xDE1A7, static_cast<std::uint64_t>(s.rank.rank)));
    Layer layer(s.rank, s.c, s.batch, {});
    for (int step = 0; step < 8; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      turn_routing(s.rank, s.c, s.batch, step);
      s.batch.prepare(s.group.get());
      Layer by_calls(s.rank, s.c, s.batch, {});
      by_calls.forward_by_calls(s.group.get());
      by_calls.backward_by_calls(s.group.get());
      random_delay(delays);
      ok(layer.forward(s.group.get(), s.c.parts));
      random_delay(delays);
      ok(layer.backward(s.group.get(), s.c.parts));
      layer.expect_equal(by_calls);
    }
  });
}

TEST(Moe, HasThemInEveryFormOfItsTensors) {
  Case c = layer_case(world().num_ranks(), 4);
  std::vector<Layer::Options> all = {{.grad_type = kF32},
                                     {.grad_type = kF32, .accumulate = true},
                                     {.activation = XD_GATED_RELU_SQUARED},
                                     {.place = Place::symmetric}};
  std::vector<DLDataType> types = {kBf16, kF16};
  if (!on_devices()) types.push_back(kF32);
  for (const DLDataType type : types) {
    c.dtype = type;
    on_scenes(c, [&](Scene& s) {
      for (Layer::Options options : all) {
        if (options.grad_type.bits == 16) options.grad_type = type;
        expect_bits_of_the_calls(s, options);
      }
    });
  }
}

TEST(Moe, MayPutGradientsInThePlaceOfWhatItHasKept) {
  on_scenes(layer_case(world().num_ranks(), 2), [](Scene& s) {
    Layer by_calls(s.rank, s.c, s.batch, {.in_place = true});
    by_calls.forward_by_calls(s.group.get());
    by_calls.backward_by_calls(s.group.get());
    Layer layer(s.rank, s.c, s.batch, {.in_place = true});
    ok(layer.forward(s.group.get(), s.c.parts));
    ok(layer.backward(s.group.get(), s.c.parts));
    layer.expect_equal(by_calls);
  });
}

TEST(Moe, TakesNoMoreMultiprocessorsThanItsGroupMayUse) {
  on_every_rank([](Rank& rank) {
    Scene s(rank, layer_case(rank.num_ranks, 2), XD_EP_STAGING_AUTO, 4);
    Layer by_calls(rank, s.c, s.batch, {}), layer(rank, s.c, s.batch, {});
    by_calls.forward_by_calls(s.group.get());
    by_calls.backward_by_calls(s.group.get());
    ok(layer.forward(s.group.get(), s.c.parts, 1000));
    ok(layer.backward(s.group.get(), s.c.parts, 1000));
    layer.expect_equal(by_calls);
  });
}

// The matrices of one tensor [L,n], behind one another in each row, as an optimiser may keep them.
TEST(Moe, WritesGradientsOfBothMatricesIntoOneTensor) {
  on_scenes(layer_case(world().num_ranks(), 1), [](Scene& s) {
    Layer apart(s.rank, s.c, s.batch, {}), layer(s.rank, s.c, s.batch, {});
    xd_moe_backward_args& args = layer.backward_args;
    DLTensor in = *args.grad_w_in, out = *args.grad_w_out;
    const std::int64_t experts = in.shape[0];
    const std::int64_t in_size = in.shape[1] * in.shape[2], out_size = out.shape[1] * out.shape[2];
    Tensor both(s.rank, kBf16, {experts, in_size + out_size});
    std::int64_t in_strides[] = {in_size + out_size, in.shape[2], 1};
    std::int64_t out_strides[] = {in_size + out_size, out.shape[2], 1};
    in.data = out.data = both.dl()->data;
    in.byte_offset = both.dl()->byte_offset;
    out.byte_offset = in.byte_offset + static_cast<std::uint64_t>(in_size) * 2;
    in.strides = in_strides;
    out.strides = out_strides;
    args.grad_w_in = &in;
    args.grad_w_out = &out;
    for (Layer* one : {&apart, &layer}) {
      ok(one->forward(s.group.get(), 0));
      ok(one->backward(s.group.get(), 0));
    }
    std::vector<std::byte> expected;
    const auto append = [&](const std::vector<std::byte>& all, std::int64_t expert,
                            std::int64_t size) {
      expected.insert(expected.end(), all.begin() + expert * size * 2,
                      all.begin() + (expert + 1) * size * 2);
    };
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      append(apart.grad_w_in().read(), expert, in_size);
      append(apart.grad_w_out().read(), expert, out_size);
    }
    EXPECT_TRUE(both.read() == expected);
    out.byte_offset -= 2;  // the last element of each matrix before it
    EXPECT_EQ(layer.backward(s.group.get(), 0), XD_ERROR_INVALID_ARGUMENT);
  });
}

TEST(Moe, LeavesOutGradientsThatNobodyWants) {
  on_scenes(layer_case(world().num_ranks(), 1), [](Scene& s) {
    Layer whole(s.rank, s.c, s.batch, {}), layer(s.rank, s.c, s.batch, {});
    ok(whole.forward(s.group.get(), 0));
    ok(whole.backward(s.group.get(), 0));
    ok(layer.forward(s.group.get(), 0));
    xd_moe_backward_args& args = layer.backward_args;
    args.expert_out = args.grad_recv_weights = args.grad_topk_weights = nullptr;
    args.grad_w_in = args.grad_w_out = args.recv_tokens = args.activated = nullptr;
    ok(layer.backward(s.group.get(), 0));
    EXPECT_TRUE(layer.grad_tokens().read() == whole.grad_tokens().read());
  });
}

// ---- Errors ------------------------------------------------------------------------------------

struct Mistake {
  const char* words;  // in the text of the rank that makes it
  bool backward;
  std::function<void(Layer& layer)> make;
  bool hides_parts = false;  // the library cannot read them, and takes two turns
};

// Peers on devices make all calls of a layer's operations before they hear of the mistake.
void take_turns_left(Scene& s, const Mistake& mistake, int parts) {
  if (!on_devices() || !mistake.hides_parts) return;
  const xd_ep_operation sums = mistake.backward ? XD_EP_DISPATCH_BWD : XD_EP_COMBINE;
  for (int turn = 2; turn < 2 * parts; ++turn) {
    EXPECT_EQ(xd_ep_join_failed(s.group.get(), sums, mistake.words, s.rank.stream()),
              XD_ERROR_INVALID_ARGUMENT);
  }
}

// On one rank; all others hear of it, and the group goes on.
void expect_refused(Scene& s, const Mistake& mistake, int parts) {
  SCOPED_TRACE(std::string(mistake.backward ? "backward: " : "forward: ") + mistake.words);
  const bool guilty = s.rank.rank == s.rank.num_ranks - 1;
  Layer layer(s.rank, s.c, s.batch, {});
  if (guilty) mistake.make(layer);
  const int own_parts = guilty && layer.forward_args.parts != 0 ? layer.forward_args.parts : parts;
  const Outcome outcome = mistake.backward ? layer.backward(s.group.get(), own_parts)
                                           : layer.forward(s.group.get(), own_parts);
  EXPECT_EQ(outcome, guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
  if (guilty) {
    expect_words(outcome.text, {mistake.words});
    take_turns_left(s, mistake, parts);
  } else {
    expect_words(outcome.text, {"rank " + std::to_string(s.rank.num_ranks - 1)});
  }
  // Peers on devices have products on the stream before they hear of it.
  EXPECT_TRUE(layer.untouched() || (on_devices() && !guilty));
}

// A field of one layer's arguments, by its name.
std::function<void(Layer&)> with(const char* name, bool backward, const DLTensor* tensor) {
  return [=](Layer& layer) {
    for (const Layer::Field& field : layer.fields()) {
      if (field.backward == backward && std::string(field.name) == name) *field.slot = tensor;
    }
  };
}

TEST(MoeCalls, RefuseByNameWhatDoesNotFit) {
  on_scenes(layer_case(world().num_ranks(), 2), [](Scene& s) {
    Tensor odd(s.rank, kF32, {3, 8}), few(s.rank, kI32, {1}), cube(s.rank, kBf16, {1, 8, 8});
    Layer sound(s.rank, s.c, s.batch, {});
    const std::int64_t* const weights_shape = sound.backward_args.grad_topk_weights->shape;
    Tensor few_tokens(s.rank, kF32, {weights_shape[0] - 1, weights_shape[1]});
    Tensor few_choices(s.rank, kF32, {weights_shape[0], weights_shape[1] - 1});
    std::vector<Mistake> mistakes;
    for (const Layer::Field& field : sound.fields()) {
      const bool b = field.backward;
      const std::string name = field.name;
      const bool weights = name == "topk_weights" || name == "grad_topk_weights" ||
                           name == "recv_weights" || name == "grad_recv_weights";
      const bool matrices = name.find("w_") != std::string::npos;
      const bool optional = matrices && name.starts_with("grad");
      if (!weights && !optional) mistakes.push_back({field.name, b, with(field.name, b, nullptr)});
      const DLTensor* const bad = name == "offsets" ? few.dl() : matrices ? cube.dl() : odd.dl();
      mistakes.push_back({weights ? "" : field.name, b, with(field.name, b, bad)});
    }
    const auto add = [&](const char* words, bool backward, std::function<void(Layer&)> make) {
      mistakes.push_back({words, backward, std::move(make)});
    };
    add("activation", false,
        [](Layer& l) { l.forward_args.activation = static_cast<xd_gated_activation>(9); });
    add("accumulate", true, [](Layer& l) { l.backward_args.accumulate = 1; });
    add("plan", false, [](Layer& l) { l.forward_args.plan = nullptr; });
    add("shares with", false,
        [](Layer& l) { l.forward_args.expert_out = l.forward_args.recv_tokens; });
    add("shares with", true,
        [](Layer& l) { l.backward_args.grad_recv_tokens = l.backward_args.grad_expert_out; });
    add("shares with", true, [](Layer& l) { l.backward_args.grad_w_in = l.backward_args.w_in; });
    add("recv_weights = NULL", true, [](Layer& l) { l.backward_args.recv_weights = nullptr; });
    add("reserved = 1", false, [](Layer& l) { l.forward_args.reserved = 1; });
    add("grad_topk_weights", true, with("grad_topk_weights", true, few_tokens.dl()));
    if (!on_devices()) {
      add("grad_topk_weights", true, with("grad_topk_weights", true, few_choices.dl()));
    }
    mistakes.push_back(
        {"struct_size", false, [](Layer& l) { l.forward_args.struct_size = 3; }, true});
    mistakes.push_back(
        {"struct_size", true, [](Layer& l) { l.backward_args.struct_size = 3; }, true});
    mistakes.push_back({"parts = 17", false, [](Layer& l) { l.forward_args.parts = 17; }, true});
    for (const Mistake& mistake : mistakes) expect_refused(s, mistake, s.c.parts);
    expect_bits_of_the_calls(s, {});
  });
}

TEST(MoeCalls, RefusePartsThatAreNotThePlans) {
  if (on_devices()) GTEST_SKIP() << "hosts do not read plans on devices";
  on_scenes(layer_case(world().num_ranks(), 3), [](Scene& s) {
    for (const int parts : {1, 2, 4}) {
      Layer layer(s.rank, s.c, s.batch, {});
      for (const Outcome& outcome :
           {layer.forward(s.group.get(), parts), layer.backward(s.group.get(), parts)}) {
        EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
        expect_words(outcome.text,
                     {"parts = " + std::to_string(parts) + ", expected 0 (serial) or 3"});
      }
      EXPECT_TRUE(layer.untouched());
    }
    expect_bits_of_the_calls(s, {});
  });
}

TEST(MoeCalls, FailOnAllRanksWhereThePlanOverflows) {
  on_every_rank([](Rank& rank) {
    const Case c = layer_case(rank.num_ranks, 2);
    xd_ep_config config = c.config(rank.rank);
    config.recv_capacity = c.alignment;
    const Group group = make_group(rank.comm, config);
    Batch batch(rank, c);
    batch.prepare_args.parts = c.parts;
    EXPECT_EQ(batch.call(group.get(), XD_EP_PREPARE), XD_ERROR_OVERFLOW);
    for (const int parts : schedules(c)) {
      Layer layer(rank, c, batch, {});
      EXPECT_EQ(layer.forward(group.get(), parts), XD_ERROR_OVERFLOW);
      EXPECT_EQ(layer.backward(group.get(), parts), XD_ERROR_OVERFLOW);
      EXPECT_TRUE(on_devices() || layer.untouched());
    }
  });
}

// A rank whose last operation is refused has computed by then, and so have its peers.
TEST(MoeCalls, TellThePeersOfAFailureInTheMiddle) {
  if (on_devices()) GTEST_SKIP() << "devices read expert_out anywhere";
  on_every_rank([](Rank& rank) {
    const bool guilty = rank.rank == 0;
    Scene s(rank, layer_case(rank.num_ranks, 2), XD_EP_STAGING_NONE);
    const Layer::Options sound{.place = Place::symmetric};
    for (const int parts : {0, 2}) {
      Layer layer(rank, s.c, s.batch, sound);
      Tensor elsewhere(rank, kBf16, {layer.rows(), layer.hidden()});
      if (guilty) layer.forward_args.expert_out = elsewhere.dl();
      Outcome outcome = layer.forward(s.group.get(), parts);
      EXPECT_EQ(outcome, guilty ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
      expect_words(outcome.text, {guilty ? "expert_out" : "rank 0"});
    }
    expect_bits_of_the_calls(s, sound);
  });
}

}  // namespace
}  // namespace xd::test
