#include "cases.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace bench::gpu {
namespace {

constexpr auto kDispatch = Operation::dispatch;
constexpr auto kCombine = Operation::combine;

Operation operation_named(const std::string& name) {
  for (std::size_t i = 0; i < std::size(kOperationNames); ++i) {
    if (name == kOperationNames[i]) return static_cast<Operation>(i);
  }
  throw std::invalid_argument("--operations " + name +
                              ": expected prepare, dispatch, combine, dispatch_bwd, combine_bwd");
}

// The problem that the targets are for; seed, iterations and the like come from the options.
Workload standard(const Options& options, int ranks) {
  Workload w = options.workload;
  w.ranks = ranks;
  w.tokens = 4096;
  w.hidden = 7168;
  w.topk = 8;
  w.experts = 256 / ranks * ranks;
  w.alignment = 1;
  w.weighted = false;
  w.layout = Layout::rank;
  w.element = Element::bf16;
  w.routing = "uniform";
  return w;
}

class Builder {
 public:
  Builder(const Options& options, const Limits& limits)
      : options_(options), limits_(limits), standard_(standard(options, limits.ranks)) {}

  struct Change {
    int tokens = 4096;
    Layout layout = Layout::rank;
    Element element = Element::bf16;
    bool staged = false;
    bool weighted = false;
  };
  Workload changed(const Change& change) const {
    Workload w = standard_;
    w.tokens = change.tokens;
    w.layout = change.layout;
    w.element = change.element;
    w.weighted = change.weighted;
    return w;
  }
  // The first budget of --sms, if it has been given, replaces those of the steps.
  void add(const std::string& part, const Workload& workload, bool staged,
           std::vector<Step> steps) {
    if (const int sms = options_.driver.sms.front(); sms != 0) {
      for (Step& step : steps) step.sms = sms;
    }
    add_as_is(part, workload, staged, std::move(steps));
  }
  void add_as_is(const std::string& part, const Workload& workload, bool staged,
                 std::vector<Step> steps) {
    check(workload);
    for (Step& step : steps) step.sms = std::min(step.sms, limits_.sms);
    cases_.push_back({.part = part,
                      .workload = workload,
                      .staged = staged,
                      .graph = options_.driver.graph,
                      .overlap = options_.driver.overlap,
                      .baseline = !options_.driver.no_peer,
                      .steps = std::move(steps)});
  }
  void add(const Change& change, std::vector<Step> steps) {
    add("", changed(change), change.staged, std::move(steps));
  }
  const Workload& standard_workload() const { return standard_; }
  const Limits& limits() const { return limits_; }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  const Options& options_;
  const Limits limits_;
  const Workload standard_;
  std::vector<Case> cases_;
};

std::vector<Case> budget(const Options& options, const Limits& limits) {
  Builder b(options, limits);
  const Step prepare{.operation = Operation::prepare, .target_us = 20};
  // A gradient's way back is that of the rows: combine_bwd sends as dispatch does.
  const auto combine_bwd = Operation::combine_bwd, dispatch_bwd = Operation::dispatch_bwd;
  b.add({}, {prepare,
             {kDispatch, 12, 510},
             {kCombine, 16, 510},
             {combine_bwd, 12, 510},
             {dispatch_bwd, 16, 510}});
  b.add({.element = Element::fp8}, {{kDispatch, 12, 290}});
  b.add({.element = Element::bf16_to_fp8}, {{kDispatch, 12}});
  b.add({.layout = Layout::expert},
        {{kDispatch, 24, 600}, {kCombine, 32, 600}, {combine_bwd, 24}, {dispatch_bwd, 32}});
  b.add({.layout = Layout::expert, .weighted = true},
        {{kDispatch, 24}, {kCombine, 32}, {dispatch_bwd, 32}, {combine_bwd, 24}, {combine_bwd}});
  b.add({.weighted = true}, {{kDispatch, 12}, {dispatch_bwd, 16}});
  b.add({.layout = Layout::expert, .element = Element::fp8}, {{kDispatch, 24}});
  b.add({.tokens = 128}, {{Operation::prepare}, {kDispatch, 0, 19}, {kCombine, 0, 22}});
  b.add({.tokens = 128, .element = Element::fp8}, {{kDispatch, 0, 15}});
  b.add({.tokens = 128, .layout = Layout::expert}, {{kDispatch}, {kCombine}});
  b.add({.staged = true}, {{kDispatch, 12}, {kDispatch, 24}, {kCombine, 16}});
  b.add({.layout = Layout::expert, .staged = true}, {{kDispatch, 24}, {kCombine, 32}});
  return b.take();
}

// Combine under each wire, of many and of few tokens, with each budget.
std::vector<Case> wires(const Options& options, const Limits& limits) {
  Builder b(options, limits);
  std::vector<Step> steps;
  for (const int sms : options.driver.sms) steps.push_back({kCombine, sms});
  for (const int tokens : {4096, 128}) {
    for (const Layout layout : {Layout::rank, Layout::expert}) {
      Workload w = b.changed({.tokens = tokens, .layout = layout});
      for (const xd_ep_wire wire : kWires) {
        w.combine_wire = wire;
        b.add_as_is("wires", w, false, steps);
      }
    }
  }
  return b.take();
}

void sweep_tokens(Builder& b) {
  for (const int tokens : {1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}) {
    const Step prepare{.operation = Operation::prepare};
    b.add("tokens", b.changed({.tokens = tokens}), false, {prepare, {kDispatch}, {kCombine}});
    b.add("tokens", b.changed({.tokens = tokens, .element = Element::fp8}), false, {{kDispatch}});
    b.add("tokens", b.changed({.tokens = tokens, .layout = Layout::expert}), false,
          {{kDispatch}, {kCombine}});
  }
}

void sweep_batch(Builder& b, const std::string& part) {
  const auto add = [&](const Workload& w) { b.add(part, w, false, {{kDispatch}, {kCombine}}); };
  Workload w = b.standard_workload();
  if (part == "topk") {
    for (const int topk : {1, 2, 4, 6, 8}) {
      w.topk = topk;
      add(w);
    }
  } else if (part == "experts") {
    for (const int experts : {32, 64, 128, 256, 512, 1024}) {
      w.experts = experts / w.ranks * w.ranks;
      if (w.experts >= w.topk) add(w);
    }
  } else if (part == "skew") {
    for (const Layout layout : {Layout::rank, Layout::expert}) {
      for (const char* const routing : {"uniform", "zipf", "hot"}) {
        w.layout = layout;
        w.routing = routing;
        add(w);
      }
    }
  }
}

void sweep_sms(Builder& b) {
  for (const Layout layout : {Layout::rank, Layout::expert}) {
    for (const int sms : {4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 132}) {
      if (sms > b.limits().sms) continue;
      b.add_as_is("sms", b.changed({.layout = layout}), false, {{kDispatch, sms}, {kCombine, sms}});
    }
  }
}

void sweep_gpus(std::vector<Case>& cases, const Options& options, const Limits& limits) {
  for (const int ranks : {2, 3, 4, 6, 8}) {
    if (ranks > std::min(limits.ranks, limits.devices)) continue;
    if (ranks != limits.ranks && !limits.may_shrink) continue;
    Limits fewer = limits;
    fewer.ranks = ranks;
    Builder b(options, fewer);
    for (const Layout layout : {Layout::rank, Layout::expert}) {
      b.add("gpus", b.changed({.layout = layout}), false, {{kDispatch}, {kCombine}});
    }
    for (Case& one : b.take()) cases.push_back(std::move(one));
  }
}

std::vector<Case> sweep(const Options& options, const std::string& only, const Limits& limits) {
  const std::set<std::string> parts{"tokens", "topk", "experts", "skew", "gpus", "sms"};
  if (!only.empty() && !parts.contains(only)) {
    throw std::invalid_argument("--preset sweep:" + only +
                                ": expected tokens, topk, experts, skew, gpus or sms");
  }
  const auto wanted = [&](const char* part) { return only.empty() || only == part; };
  Builder b(options, limits);
  if (wanted("tokens")) sweep_tokens(b);
  for (const char* const part : {"topk", "experts", "skew"}) {
    if (wanted(part)) sweep_batch(b, part);
  }
  if (wanted("sms")) sweep_sms(b);
  std::vector<Case> cases = b.take();
  if (wanted("gpus")) sweep_gpus(cases, options, limits);
  return cases;
}

// A wire is a case of its own behind that without.
void add_with_wire(const Case& one, xd_ep_wire wire, std::vector<Case>& cases) {
  cases.push_back(one);
  Case wired = one;
  wired.workload.combine_wire = wire;
  std::erase_if(wired.steps, [](const Step& step) { return step.operation != kCombine; });
  if (wire != XD_EP_WIRE_SAME && !wired.steps.empty()) cases.push_back(std::move(wired));
}

std::vector<Case> from_command_line(const Options& options, int ranks) {
  Workload w = options.workload;
  w.ranks = ranks;
  check(w);
  w.combine_wire = XD_EP_WIRE_SAME;
  std::vector<std::string> names = options.driver.operations;
  if (names.empty()) {
    names.assign(std::begin(kOperationNames), std::end(kOperationNames));
    if (w.is_fp8()) names.resize(2);  // combine takes no fp8
  }
  std::vector<Case> cases;
  for (const bool staged : {false, true}) {
    if (!(staged ? options.driver.staged : options.driver.zero_copy)) continue;
    Case one{.part = "",
             .workload = w,
             .staged = staged,
             .graph = options.driver.graph,
             .overlap = options.driver.overlap,
             .baseline = !options.driver.no_peer,
             .steps = {}};
    for (const int sms : options.driver.sms) {
      for (const std::string& name : names) one.steps.push_back({operation_named(name), sms});
    }
    add_with_wire(one, options.workload.combine_wire, cases);
  }
  return cases;
}

}  // namespace

std::vector<Case> make_cases(const Options& options, const Limits& limits) {
  const std::string& preset = options.driver.preset;
  if (preset.empty()) return from_command_line(options, limits.ranks);
  if (preset == "budget") return budget(options, limits);
  if (preset == "wires") return wires(options, limits);
  if (preset == "sweep") return sweep(options, "", limits);
  if (preset.starts_with("sweep:")) return sweep(options, preset.substr(6), limits);
  throw std::invalid_argument("--preset " + preset +
                              ": expected budget, wires, sweep or sweep:PART");
}

}  // namespace bench::gpu
