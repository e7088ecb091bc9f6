#include "faults/join_program.h"

#include <crossdock/view.h>
#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>
#include <vector>

#include "conformance/batch.h"
#include "faults/hex.h"
#include "faults/resume_program.h"
#include "support/usage.h"

namespace xd::test {
namespace {

std::vector<int> ranks_of(const std::uint64_t* words, int num_ranks) {
  std::vector<int> ranks;
  for (int r = 0; r < num_ranks; ++r) {
    if ((words[r / 64] >> r % 64 & 1) != 0) ranks.push_back(r);
  }
  return ranks;
}

std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text.empty() ? "-" : text;
}

class Joining : private LlSeat {
 public:
  Joining(const RankProgram& program, const Rank& of_rank, const Talk& talk)
      : LlSeat(of_rank, echo_case(program.num_ranks),
               {XD_LL_PEER_LOSS_MASK, program.wait_timeout_ms}),
        talk_(talk) {
    if (!program.resumes || program.joins) return;
    Case many = case_of(program);
    resumed_.push_back({many, make_group(rank.comm, many.config(rank.rank))});
  }

  // False = the rank leaves.
  bool obey(const std::string& line) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "end") return false;
    if (what == "steps") steps(words);
    if (what == "run") run(words);
    if (what == "send") send_half(words);
    if (what == "agree") agree(words);
    if (what == "alone") alone(words);
    if (what == "invite") invite();
    if (what == "lost") talk_.say("lost 0 " + listed(lost_now()));
    if (what == "refused") refused();
    if (what == "resources") resources();
    return true;
  }

 private:
  void tell(xd_status status, const std::string& text) {
    talk_.say("result " + std::to_string(status) + " " + std::to_string(rank.rank) + " 0 0 " +
              text);
  }

  void step(int number, const std::vector<bool>& lost) {
    Echo batch(rank, c, number);
    ok(dispatch(batch));
    if (batch.rows_by_source() != batch.expected_rows(lost)) {
      throw std::runtime_error("batch " + std::to_string(number) + " has rows " +
                               testing::PrintToString(batch.rows_by_source()) + ", expected " +
                               testing::PrintToString(batch.expected_rows(lost)));
    }
    ok(combine(batch));
    const std::string wrong = batch.wrong(lost);
    if (!wrong.empty()) throw std::runtime_error("batch " + std::to_string(number) + ": " + wrong);
  }

  void steps(std::istringstream& words) {
    int first = 0, count = 0;
    std::string ranks;
    words >> first >> count >> ranks;
    std::vector<bool> lost = nobody(rank.num_ranks);
    std::istringstream list(ranks == "-" ? "" : ranks);
    for (std::string one; std::getline(list, one, ',');) lost.at(std::stoul(one)) = true;
    for (int number = first; number < first + count; ++number) step(number, lost);
    run_batches(rank, resumed_, first, count);
    talk_.say("done");
  }

  void alone(std::istringstream& words) {
    int count = 0;
    words >> count;
    std::vector<bool> lost(static_cast<std::size_t>(rank.num_ranks), true);
    lost[static_cast<std::size_t>(rank.rank)] = false;
    for (int number = 0; number < count; ++number) step(number, lost);
    talk_.say("done");
  }

  void run(std::istringstream& words) {
    int first = 0;
    words >> first;
    for (int number = first;; ++number) {
      if (number == first + kStepsBeforeKill) talk_.say("progress");
      Echo batch(rank, c, number);
      for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
        const LlOutcome outcome = call(batch, kind);
        if (outcome == XD_SUCCESS) continue;
        return tell(outcome.status, outcome.text);
      }
    }
  }

  void send_half(std::istringstream& words) {
    int number = 0;
    words >> number;
    Echo batch(rank, c, number);
    ok(dispatch(batch, XD_LL_PHASE_SEND));
    talk_.say("done");
  }

  // A reset may meet a further loss: then the view is followed by "-".
  void agree(std::istringstream& words) {
    xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
    words >> args.timeout_ms;
    xd_view view XD_VIEW_INIT;
    const xd_status status = xd_comm_agree(rank.comm, &args, &view);
    if (status != XD_SUCCESS) return tell(status, xd_last_error());
    for (Resumed& resumed : resumed_) {
      ok(xd_ep_group_enter_view(resumed.group.get(), rank.stream()));
      // A place that is taken anew is none of this group.
      resumed.c.gone |= ~view.members[0] & ((std::uint64_t{1} << rank.num_ranks) - 1);
    }
    for (int other = 0; other < rank.num_ranks; ++other) {
      const bool is_member = (view.members[other / 64] >> other % 64 & 1) != 0;
      if (other != rank.rank) mask(other, !is_member);
    }
    const LlOutcome outcome = reset();
    if (outcome != XD_SUCCESS) return tell(outcome.status, outcome.text);
    tell(XD_SUCCESS, std::to_string(view.number) + ":" +
                         listed(ranks_of(view.members, rank.num_ranks)) + " joined " +
                         listed(ranks_of(view.joined, rank.num_ranks)));
  }

  void invite() {
    xd_unique_id invitation{};
    const xd_status status = xd_comm_invite(rank.comm, &invitation);
    tell(status, status == XD_SUCCESS ? to_hex(invitation) : xd_last_error());
  }

  std::vector<int> lost_now() const {
    std::vector<std::int32_t> is_lost(static_cast<std::size_t>(rank.num_ranks), -1);
    ok(xd_comm_lost(rank.comm, is_lost.data()));
    std::vector<int> ranks;
    for (int r = 0; r < rank.num_ranks; ++r) {
      if (is_lost[static_cast<std::size_t>(r)] != 0) ranks.push_back(r);
    }
    return ranks;
  }

  // Twice, as no refusal may bring ranks out of step.
  void refused() {
    for (int i = 0; i < 2; ++i) {
      tell(xd_comm_barrier(rank.comm), xd_last_error());
      tell(xd_mem_grow(rank.comm, 4096), xd_last_error());
      const xd_ep_config config = plain_case(rank.num_ranks).config(rank.rank);
      xd_ep_group* made = nullptr;
      tell(xd_ep_group_create(rank.comm, &config, &made), xd_last_error());
    }
  }

  void resources() {
    tell(XD_SUCCESS, std::to_string(open_descriptors()) + " descriptors, " +
                         std::to_string(live_threads()) + " threads, " +
                         std::to_string(shared_bytes()) + " bytes");
  }

  const Talk& talk_;
  std::vector<Resumed> resumed_;  // of a rank from the beginning
};

}  // namespace

std::string run_joining(const RankProgram& program, const Rank& rank, const Talk& talk,
                        const std::function<std::string()>& read_line) {
  Joining run(program, rank, talk);
  talk.say("ready");
  while (run.obey(read_line())) {
  }
  return "clean";
}

}  // namespace xd::test
