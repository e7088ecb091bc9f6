#include "faults/view_program.h"

#include <crossdock/view.h>

#include <sstream>

namespace xd::test {
namespace {

std::string members_of(const xd_view& view, int num_ranks) {
  std::string members;
  for (int r = 0; r < num_ranks; ++r) {
    if ((view.members[r / 64] >> r % 64 & 1) == 0) continue;
    members += (members.empty() ? "" : ",") + std::to_string(r);
  }
  return members;
}

class Agreeing {
 public:
  Agreeing(const RankProgram& program, const Rank& rank, const Talk& talk)
      : program_(program), rank_(rank), talk_(talk), history_("0:") {
    ok(xd_comm_get_view(rank.comm, &view_));
    history_ += members_of(view_, program.num_ranks);
  }

  void run() {
    talk_.wait_for_go();
    const int left = program_.num_ranks - program_.losses;
    for (int more = 0;;) {
      const bool enough = more >= program_.views;
      if (!agree(enough)) return come_back();
      if (view_.number == kViewsBeforeLoss) talk_.say("progress");
      if (view_.num_members == left) ++more;
      if (view_.all_ok == 1) break;
    }
    if (program_.calls < 2) return;
    talk_.wait_for_go();
    while (view_.num_members < program_.num_ranks) agree(true);
  }
  std::string history() const { return wrong_.empty() ? history_ : wrong_; }

 private:
  // False = this rank has been left out.
  bool agree(bool is_ok) {
    const xd_view before = view_;
    xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
    args.timeout_ms = program_.wait_timeout_ms;
    args.ok = is_ok ? 1 : 0;
    args.step = rank_.rank + 100 * static_cast<std::int64_t>(before.number);
    const xd_status status = xd_comm_agree(rank_.comm, &args, &view_);
    if (status != XD_SUCCESS) {
      tell(status);
      return false;
    }
    const std::string members = members_of(view_, program_.num_ranks);
    if (members != members_of(before, program_.num_ranks)) {
      history_ += ' ' + std::to_string(view_.number) + ':' + members;
    }
    if (view_.number != before.number + 1) wrong_ = "views leave a number out";
    if (view_.joined[0] != 0) return true;  // its step did not count with the others'
    if (view_.first_step / 100 != static_cast<std::int64_t>(before.number)) wrong_ = "wrong steps";
    return true;
  }

  void tell(xd_status status) {
    std::ostringstream line;
    line << "result " << status << " " << rank_.rank << " 0 0 " << xd_last_error();
    talk_.say(line.str());
  }

  void come_back() {
    talk_.wait_for_go();
    xd_comm_agree_args args = XD_COMM_AGREE_ARGS_INIT;
    args.timeout_ms = 30000;
    xd_status status = xd_comm_agree(rank_.comm, &args, &view_);
    // A rank that has stood still past the end of its call learns only now what was decided.
    if (status == XD_ERROR_PEER_LOST) status = xd_comm_agree(rank_.comm, &args, &view_);
    if (status != XD_SUCCESS) wrong_ = xd_last_error();
    if ((view_.members[0] >> rank_.rank & 1) == 0) wrong_ = "has not come back";
    history_ = "last " + std::to_string(view_.number) + ':' + members_of(view_, program_.num_ranks);
  }

  const RankProgram& program_;
  const Rank& rank_;
  const Talk& talk_;
  xd_view view_ XD_VIEW_INIT;
  std::string history_, wrong_;
};

}  // namespace

std::string run_agreeing(const RankProgram& program, const Rank& rank, const Talk& talk) {
  Agreeing run(program, rank, talk);
  run.run();
  return run.history();
}

}  // namespace xd::test
