// The error texts of docs/errors.md, as two ranks get them.
//   crossdock-run -n 2 --threads --no-prefix -- error-examples
#include <sys/wait.h>
#include <unistd.h>

#include <regex>
#include <stdexcept>
#include <string>
#include <thread>

#include "docs/sections.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

constexpr std::size_t kHeapBytes = std::size_t{1} << 20;

xd_ep_config small_config() {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_topk = 2;
  config.max_tokens_per_rank = 4;
  config.hidden = 8;
  return config;
}

// The text of the last error, with one number for all processes, and names without the prefix by
// which the tests tell their runs apart.
std::string last_error() {
  const std::string text =
      std::regex_replace(xd_last_error(), std::regex("pid [0-9]+"), "pid 4711");
  return std::regex_replace(text, std::regex("'run[0-9]+\\."), "'");
}

// Says what a call that has to fail has come to.
void tell(Sections& out, int rank, xd_status status) {
  if (status == XD_SUCCESS) throw std::runtime_error("a call succeeded, expected an error");
  out.line("rank " + std::to_string(rank) + "  " + xd_status_name(status));
  out.line("        " + last_error());
}

// One communicator with one group, for errors that finish it.
struct Small {
  Small(Rank& of, const std::string& name, int timeout_ms = Rank::kTimeoutMs)
      : rank(of), comm(rank.another_comm(name, kHeapBytes, timeout_ms)) {
    group = make_group(comm.get(), small_config());
    const xd_ep_config config = small_config();
    plan = make_plan(rank, config);
  }

  xd_status prepare(int topk = 2) {
    Tensor topk_idx(rank, kI32, {1, topk});
    topk_idx.write(std::vector<std::int32_t>(static_cast<std::size_t>(topk), -1));
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx.dl();
    set_plan(args, plan);
    return xd_ep_prepare(group.get(), &args, nullptr);
  }

  xd_status combine(const Buffer& with_plan) {
    Tensor rows(rank, kBf16, {4, 8}), out(rank, kBf16, {1, 8});
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    set_plan(args, with_plan);
    args.expert_out = rows.dl();
    args.out = out.dl();
    return xd_ep_combine(group.get(), &args, nullptr);
  }

  Rank& rank;
  Comm comm;
  Group group;
  Buffer plan;
};

// ---- Errors that leave everything usable ----

void non_fatal(Rank& rank, Sections& out) {
  Small small(rank, "non-fatal");
  out.begin("bad-argument");
  tell(out, rank.rank, small.prepare(rank.rank == 0 ? 3 : 2));

  out.begin("mismatch");
  tell(out, rank.rank, small.prepare(rank.rank == 0 ? 1 : 2));

  out.begin("other-operation");
  ok(small.prepare());
  tell(out, rank.rank, rank.rank == 0 ? small.prepare() : small.combine(small.plan));

  out.begin("join-failed");
  const char* const text = "the router gave a tensor of 3 dimensions";
  tell(out, rank.rank,
       rank.rank == 0 ? xd_ep_join_failed(small.group.get(), XD_EP_PREPARE, text, nullptr)
                      : small.prepare());

  out.begin("no-plan");
  Buffer zeros(rank, small.plan.bytes(), Place::ordinary);
  zeros.fill(std::byte{0});
  tell(out, rank.rank, small.combine(zeros));
}

void group_mismatch(Rank& rank, Sections& out) {
  out.begin("group-mismatch");
  xd_ep_config config = small_config();
  if (rank.rank == 1) config.hidden = 16;
  xd_ep_group* group = nullptr;
  tell(out, rank.rank, xd_ep_group_create(rank.comm, &config, &group));
}

// Errors that one rank finds out by itself; here rank 0 does.
void alone(Rank& rank, Sections& out) {
  out.begin("out-of-memory");
  Comm comm = rank.another_comm("alone", kHeapBytes);
  void* memory = nullptr;
  if (rank.rank == 0) tell(out, 0, xd_mem_alloc(comm.get(), 2 * kHeapBytes, &memory));

  out.begin("unsupported");
  int32_t registration = -1;
  if (rank.rank == 0) tell(out, 0, xd_mem_register(comm.get(), &registration, 4, &registration));

  out.begin("system");
  xd_unique_id_config id_config = XD_UNIQUE_ID_CONFIG_INIT;
  id_config.address = "192.0.2.1";  // an address of no host, reserved for documentation
  id_config.port = 29500;
  xd_unique_id id;
  if (rank.rank == 0) tell(out, 0, xd_unique_id_create(&id_config, &id));

  out.begin("did-not-come");
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  xd_comm* none = nullptr;
  config.num_ranks = 2;
  config.timeout_ms = 500;
  config.name = "rank 1 never comes";
  if (rank.rank == 0) tell(out, 0, xd_comm_create(&config, &none));
  ok(xd_comm_barrier(rank.comm));
}

// ---- Errors that finish the communicator ----

void timeout(Rank& rank, Sections& out) {
  Small small(rank, "timeout", 2000);
  out.begin("timeout");
  if (rank.rank == 0) {
    tell(out, 0, small.prepare());
    const xd_error_info info = comm_error(small.comm.get());
    out.line("        xd_comm_error: rank " + std::to_string(info.rank) + ", peer " +
             std::to_string(info.peer) + ", group " + std::to_string(info.group) +
             ", expected epoch " + std::to_string(info.expected_epoch) + ", seen " +
             std::to_string(info.seen_epoch));
  }
  ok(xd_comm_barrier(rank.comm));  // rank 1 comes late
  if (rank.rank == 1) tell(out, 1, small.prepare());
}

void left(Rank& rank, Sections& out) {
  Small small(rank, "left");
  out.begin("left");
  if (rank.rank == 1) small.comm.reset();
  if (rank.rank == 0) tell(out, 0, small.prepare());
}

void aborted(Rank& rank, Sections& out) {
  Small small(rank, "aborted");
  out.begin("aborted");
  if (rank.rank == 1) ok(xd_comm_abort(small.comm.get()));
  tell(out, rank.rank, small.prepare());
}

void busy(Rank& rank, Sections& out) {
  Small small(rank, "busy");
  out.begin("busy");
  if (rank.rank == 0) {
    // Rank 1 does not take part, so whichever thread comes first is still there.
    std::thread other([&] { xd_ep_join_failed(small.group.get(), XD_EP_PREPARE, "", nullptr); });
    const xd_status status = small.prepare();
    other.join();
    tell(out, 0, status);
  }
  ok(xd_comm_barrier(rank.comm));
}

// Rank 1 is a process of its own, and dies.
Comm meet_the_mortal(int rank) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  config.rank = rank;
  config.num_ranks = 2;
  config.name = "mortal";
  config.timeout_ms = Rank::kTimeoutMs;
  return make_comm(config);
}

void lost(Rank& rank, Sections& out) {
  out.begin("lost");
  if (rank.rank != 0) return;
  const Comm comm = meet_the_mortal(0);
  tell(out, 0, xd_comm_barrier(comm.get()));
}

void all(Rank& rank, Sections& out) {
  for (const auto step : {non_fatal, group_mismatch, alone, timeout, left, aborted, busy, lost}) {
    step(rank, out);
  }
}

int run() {
  // Before there are threads.
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      const Comm comm = meet_the_mortal(1);
      ::_exit(0);  // without goodbye
    } catch (const CallFailed&) {
      ::_exit(1);
    }
  }
  const int code = run_sections(all);
  ::waitpid(child, nullptr, 0);
  return code;
}

}  // namespace
}  // namespace xd::test

int main() { return xd::test::run(); }
