#include "faults/rank_program.h"

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/fixed_step.h"
#include "conformance/moe/layer.h"
#include "faults/fatal_argument.h"
#include "faults/gemm_call.h"
#include "faults/hex.h"
#include "faults/join_program.h"
#include "faults/ll/program.h"
#include "faults/meeting.h"
#include "faults/resume_program.h"
#include "faults/view_program.h"
#include "support/handles.h"
#include "support/memory.h"
#include "support/usage.h"

#if defined(XD_CUDA)
#include "conformance/cuda/graph.h"
#endif

namespace xd::test {
namespace {

constexpr const char* kOption = "--rank-program";

std::mutex input_mutex;
std::mutex output_mutex;
std::string executor_name = "cpu";

// One rank of this process, from its first line to its last.
class RankRun {
 public:
  RankRun(const RankProgram& program, int rank)
      : program_(program),
        memory_(make_memory(executor(), rank)),
        rank_{rank, program.num_ranks, false, nullptr, memory_.get(), "", {}} {}

  void run() {
    xd_comm_config config =
        id_config(program_.id, rank_.rank, program_.num_ranks, program_.timeout_ms);
    config.on_peer_loss = program_.on_peer_loss;
    config.device = memory_->device();
    const std::string host = "host" + std::to_string(rank_.rank);
    if (program_.apart) config.host = host.c_str();
    if (program_.silence_ms > 0) config.silence_ms = program_.silence_ms;
    config.heap_bytes = program_.program == Program::create ? program_.bytes : std::size_t{1} << 20;
    config.elastic = program_.program == Program::join ? 1 : 0;
    if (program_.joins) {
      config.bootstrap = XD_BOOTSTRAP_JOIN;
      config.rank = program_.wanted;
      config.heap_bytes = 0;
      say("joins");
    }
    if (program_.program == Program::create) wait_for_go();
    xd_comm* comm = nullptr;
    const xd_status created = xd_comm_create(&config, &comm);
    comm_.reset(comm);
    rank_.comm = comm;
    if (program_.program == Program::join && created != XD_SUCCESS) return report(created);
    if (program_.joins) check_place();
    if (program_.program == Program::create || created != XD_SUCCESS) {
      report(created);
      return after(created);
    }
    run_program();
  }

 private:
  // With a communicator.
  void run_program() {
    switch (program_.program) {
      case Program::create_group:
      case Program::grow:
        return after(run_collective());
      case Program::outlive:
        return after(run_outliving());
      case Program::ll_operation:
      case Program::ll_steps:
        return after(run_low_latency());
      case Program::create_context:
      case Program::gemm_operation:
      case Program::gemm_steps:
        return after(run_products());
      case Program::layers:
        return after(run_layers());
      case Program::ll_masked:
        return say("after " + run_ll_masked(program_, rank_,
                                            {[this](const std::string& text) { say(text); },
                                             [this] { wait_for_go(); }}));
      case Program::agree:
        return say("after " + run_agreeing(program_, rank_,
                                           {[this](const std::string& text) { say(text); },
                                            [this] { wait_for_go(); }}));
      case Program::resume:
        return end_clean(run_resuming(
            program_, rank_,
            {[this](const std::string& text) { say(text); }, [this] { wait_for_go(); }}));
      case Program::join:
        return say("after " + run_joining(program_, rank_,
                                          {[this](const std::string& text) { say(text); },
                                           [this] { wait_for_go(); }},
                                          [this] { return read_line(); }));
      default:
        return after(run_operations());
    }
  }

  void say(const std::string& text) {
    const std::lock_guard lock(output_mutex);
    std::printf("%d %s\n", rank_.rank, text.c_str());
    std::fflush(stdout);
  }

  void wait_for_go() {
    say("ready");
    read_line();
  }

  std::string read_line() {
    const std::lock_guard lock(input_mutex);
    std::string line;
    if (!std::getline(std::cin, line)) throw std::runtime_error("the test has gone");
    return line;
  }

  // The test knows the rank by the number with which it was started.
  void check_place() const {
    xd_comm_info info XD_COMM_INFO_INIT;
    ok(xd_comm_get_info(comm_.get(), &info));
    if (info.rank != rank_.rank)
      throw std::runtime_error("has taken the place of rank " + std::to_string(info.rank));
  }

  void report(xd_status status) {
    report(status, status == XD_SUCCESS ? "" : xd_last_error(), false);
  }

  void report(xd_status status, const std::string& text, bool outputs_written) {
    xd_error_info info = XD_ERROR_INFO_INIT;
    if (comm_) ok(xd_comm_error(comm_.get(), &info));
    std::ostringstream line;
    line << "result " << status << " " << info.peer << " " << info.phase << " " << outputs_written
         << " " << text;
    say(line.str());
  }

  std::vector<int> lost_ranks() const {
    std::vector<std::int32_t> is_lost(static_cast<std::size_t>(program_.num_ranks), -1);
    ok(xd_comm_lost(comm_.get(), is_lost.data()));
    std::vector<int> ranks;
    for (int r = 0; r < program_.num_ranks; ++r) {
      if (is_lost[static_cast<std::size_t>(r)] != 0) ranks.push_back(r);
    }
    return ranks;
  }

  xd_status create(Group& group) {
    const xd_ep_config config = case_of(program_).config(rank_.rank);
    xd_ep_group* made = nullptr;
    const xd_status status = xd_ep_group_create(comm_.get(), &config, &made);
    group.reset(made);
    return status;
  }

  xd_status run_collective() {
    wait_for_go();
    const xd_status status = program_.program == Program::grow
                                 ? xd_mem_grow(comm_.get(), program_.bytes)
                                 : create(group_);
    report(status);
    return status;
  }

  // Tells which ranks are lost as soon as all are. Then makes calls that need them, twice each, as
  // no failure of them may bring ranks out of step; then those that need none. When told to go on,
  // an operation.
  xd_status run_outliving() {
    group_ = make_group(comm_.get(), case_of(program_).config(rank_.rank));
    Batch batch(rank_, case_of(program_), 0, Place::ordinary);
    batch.prepare(group_.get());
    wait_for_go();
    while (lost_ranks().size() < static_cast<std::size_t>(program_.losses)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    say_lost();
    for (int i = 0; i < 2; ++i) {
      report(xd_comm_barrier(comm_.get()));
      report(xd_mem_grow(comm_.get(), 4096));
      Group another;
      report(create(another));
    }
    void* memory = nullptr;
    ok(xd_mem_alloc(comm_.get(), 64, &memory));
    ok(xd_mem_free(comm_.get(), memory));
    say_lost();
    wait_for_go();  // the end of a rank that has gone on would be another loss
    const Outcome outcome = batch.call(group_.get(), program_.bulk_operation());
    report(outcome.status, outcome.text, false);
    return outcome.status;
  }

  void say_lost() {
    std::ostringstream line;
    line << "lost " << comm_error(comm_.get()).status << " ";
    const char* comma = "";
    for (const int rank : lost_ranks()) line << std::exchange(comma, ",") << rank;
    say(line.str());
  }

  xd_status run_operations() {
    if (program_.registered) use_registered_memory();
    const Case c = case_of(program_);
    group_ = make_group(comm_.get(), c.config(rank_.rank));
    // In symmetric memory outputs show what peers have moved; the fatal argument alone is staged.
    Batch batch(rank_, c, 0, someone_dies() ? Place::symmetric : Place::ordinary);
    batch.prepare_args.parts = program_.parts;
    batch.prepare(group_.get());
    go_to_part(batch);
    batch.poison_outputs();
    wait_for_go();
    if (rank_.rank == program_.death.victim) die(batch);
    Outcome outcome{};
    if (program_.program == Program::operation) {
      for (int i = 0; i < program_.calls && outcome == XD_SUCCESS; ++i) {
        outcome = batch.call(group_.get(), program_.bulk_operation());
        report(outcome.status, outcome.text, !batch.untouched(program_.bulk_operation()));
      }
    } else if (program_.program == Program::replays) {
      outcome = replay(batch);
      report(outcome.status, outcome.text, false);
    } else {
      for (std::size_t i = 0; outcome == XD_SUCCESS; ++i) {
        outcome = batch.call(group_.get(), kStepOperations[i % std::size(kStepOperations)]);
      }
      report(outcome.status, outcome.text, false);
    }
    if (outcome == XD_SUCCESS) return XD_SUCCESS;
    if (program_.resumes) return go_on(outcome);
    const Outcome later = batch.call(group_.get(), XD_EP_COMBINE);
    if (later != outcome.status) say("after a later call gave another status: " + later.text);
    return outcome.status;
  }

  // The operation's next call is the program's part of it.
  void go_to_part(Batch& batch) {
    for (int part = 1; part <= program_.part; ++part) {
      batch.dispatch_args.part = batch.combine_args.part = part;
      batch.dispatch_bwd_args.part = batch.combine_bwd_args.part = part;
      if (part < program_.part) ok(batch.call(group_.get(), program_.bulk_operation()));
    }
  }

  xd_status run_layers() {
    const Case c = layer_case(program_.num_ranks, program_.parts);
    group_ = make_group(comm_.get(), c.config(rank_.rank));
    Batch batch(rank_, c);
    batch.prepare_args.parts = c.parts;
    batch.prepare(group_.get());
    Layer layer(rank_, c, batch, {});
    wait_for_go();
    Outcome outcome{};
    for (bool forward = true; outcome == XD_SUCCESS; forward = !forward) {
      outcome =
          forward ? layer.forward(group_.get(), c.parts) : layer.backward(group_.get(), c.parts);
    }
    report(outcome.status, outcome.text, false);
    const Outcome later = layer.forward(group_.get(), c.parts);
    if (later != outcome.status) say("after a later pass gave another status: " + later.text);
    return outcome.status;
  }

  // The group has outlived a loss.
  xd_status go_on(const Outcome& outcome) {
    std::vector<Resumed> groups;
    groups.push_back({case_of(program_), std::move(group_)});
    resume(rank_, groups, static_cast<int>(outcome.met.epoch));
    run_batches(rank_, groups, 0, 3);
    return XD_SUCCESS;
  }

  // Nothing is left of groups and communicator.
  void end_clean(const std::string& history) {
    if (comm_error(comm_.get()).status != XD_SUCCESS) return say("after a fatal error");
    comm_.reset();
    if (open_descriptors() > descriptors_) return say("after descriptors are left");
    if (shared_bytes() > 0) return say("after memory is left");
    say("after" + history);
  }

  xd_status run_low_latency() {
    const LlSeat& seat = seat_.emplace(rank_, echo_case(program_.num_ranks));
    Echo batch = seat.batch(0);
    ok(seat.dispatch(batch));
    ok(seat.combine(batch));
    wait_for_go();
    const LlOutcome outcome =
        program_.program == Program::ll_operation
            ? seat.call(batch, static_cast<xd_ll_operation>(program_.operation))
            : run_ll_steps(seat);
    report(outcome.status, outcome.text, false);
    if (outcome == XD_SUCCESS) return XD_SUCCESS;
    const LlOutcome later = seat.combine(batch);
    if (later != outcome.status) say("after a later call gave another status: " + later.text);
    return outcome.status;
  }

  xd_status run_products() {
    const bool steps = program_.program == Program::gemm_steps;
    const std::int64_t token_units = steps ? program_.tokens : 4;
    const xd_gemm_config config = gemm_fault_config(program_.num_ranks, token_units);
    if (program_.program == Program::create_context) {
      wait_for_go();
      xd_gemm_context* made = nullptr;
      const xd_status status = xd_gemm_context_create(comm_.get(), &config, &made);
      context_.reset(made);
      report(status);
      return status;
    }
    context_ = make_context(comm_.get(), config);
    std::vector<std::unique_ptr<GemmCall>> calls;
    for (const xd_gemm_operation operation : kGemmOperations) {
      if (!steps && operation != program_.product) continue;
      calls.push_back(std::make_unique<GemmCall>(rank_, operation, token_units));
      ok(calls.back()->call(context_.get()));
    }
    wait_for_go();
    GemmOutcome outcome{};
    for (std::size_t i = 0; outcome == XD_SUCCESS && (steps || i == 0); ++i) {
      outcome = calls[i % calls.size()]->call(context_.get());
    }
    report(outcome.status, outcome.text, false);
    if (outcome == XD_SUCCESS) return XD_SUCCESS;
    const GemmOutcome later = calls[0]->call(context_.get());
    if (later.status != outcome.status)
      say("after a later call gave another status: " + later.text);
    return outcome.status;
  }

  // The first allocation lies where the memory's one chunk begins.
  void use_registered_memory() {
    registered_ = memory_->of_virtual_memory();
    rank_.memory = registered_.get();
    std::int32_t registration = -1;
    ok(xd_mem_register(comm_.get(), registered_->allocate(1), std::size_t{1} << 26, &registration));
  }

  // Until a replay fails; several are on their way at any time.
  Outcome replay([[maybe_unused]] Batch& batch) {
#if defined(XD_CUDA)
    const Graph graph(rank_, [&] {
      for (const xd_ep_operation operation : kStepOperations) {
        ok(batch.enqueue(group_.get(), operation));
      }
    });
    for (;;) {
      for (int i = 0; i < 8; ++i) graph.launch();
      const Outcome outcome = finish(rank_, group_.get(), XD_SUCCESS);
      if (outcome != XD_SUCCESS) return outcome;
    }
#else
    throw Unavailable("these tests were built without CUDA");
#endif
  }

  bool someone_dies() const { return program_.death.victim >= 0; }

  // By the signal's default action, which sanitizers replace, and without a core file.
  [[noreturn]] void die(Batch& batch) {
    ::signal(SIGSEGV, SIG_DFL);
    ::prctl(PR_SET_DUMPABLE, 0);
    const FatalArgument argument(batch, program_);
    static_cast<void>(batch.call(group_.get(), program_.bulk_operation()));
    throw std::runtime_error("the victim lives");
  }

  // After a fatal error every call says so again, after a masked loss every collective one, after
  // another the communicator works. All can be freed, and the process is as good as new: a
  // communicator can be made in it, of all ranks but the fatal argument's victim, if there is one,
  // else of this rank alone.
  void after(xd_status status) {
    if (comm_ && status == XD_ERROR_OUT_OF_MEMORY) {  // not fatal
      if (xd_comm_barrier(comm_.get()) != XD_SUCCESS) return say("after barrier fails");
    } else if (comm_ && status != XD_SUCCESS) {
      const bool masked =
          program_.on_peer_loss == XD_COMM_PEER_LOSS_MASK &&
          (program_.program == Program::create_group || program_.program == Program::grow);
      if (comm_error(comm_.get()).status != (masked ? XD_SUCCESS : status)) {
        return say("after xd_comm_error disagrees");
      }
      if (xd_comm_barrier(comm_.get()) != status) return say("after barrier disagrees");
      if (xd_mem_grow(comm_.get(), 4096) != status) return say("after grow disagrees");
    }
    group_.reset();
    seat_.reset();
    context_.reset();
    comm_.reset();
    const xd_unique_id id = someone_dies() ? program_.death.id_of_rest : new_id();
    const int rank = rank_.rank - (rank_.rank > program_.death.victim ? 1 : 0);
    xd_comm_config config =
        someone_dies() ? id_config(id, rank, program_.num_ranks - 1) : id_config(id, 0, 1);
    config.device = memory_->device();
    config.heap_bytes = 4096;
    const Comm another = make_comm(config);
    ok(xd_comm_barrier(another.get()));
    say("after clean");
  }

  const RankProgram& program_;
  const std::size_t descriptors_ = open_descriptors();
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Memory> registered_;
  Rank rank_;
  Comm comm_;
  Group group_;
  std::optional<LlSeat> seat_;
  GemmContext context_;
};

}  // namespace

const std::string& executor() { return executor_name; }
void set_executor(const std::string& name) { executor_name = name; }

Case case_of(const RankProgram& program) {
  Case c = plain_case(program.num_ranks);
  c.resumes = program.resumes;
  c.max_tokens = program.tokens;
  c.row_units = program.tokens > 100 ? 128 : 4;
  return c;
}

std::vector<std::string> to_arguments(const RankProgram& program) {
  std::vector<std::string> arguments{kOption, executor(), to_hex<RankSettings>(program),
                                     program.fatal_argument};
  for (const int rank : program.ranks) arguments.push_back(std::to_string(rank));
  return arguments;
}

bool run_if_rank_program(const std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != kOption) return false;
  set_executor(arguments.at(1));
  RankProgram program{from_hex<RankSettings>(arguments.at(2)), arguments.at(3), {}};
  for (std::size_t i = 4; i < arguments.size(); ++i) {
    program.ranks.push_back(std::stoi(arguments[i]));
  }
  std::vector<std::thread> threads;
  for (const int rank : program.ranks) {
    threads.emplace_back([&program, rank] {
      try {
        RankRun(program, rank).run();
      } catch (const std::exception& error) {
        const std::lock_guard lock(output_mutex);
        std::printf("%d after %s\n", rank, error.what());
        std::fflush(stdout);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return true;
}

}  // namespace xd::test
