#include <crossdock/view.h>

#include <algorithm>

#include "base/options.h"
#include "capi/boundary.h"
#include "comm/views/views.h"

using xd::guarded_on;

namespace {

xd_view as_told(const xd::Views::Known& known) {
  xd_view view XD_VIEW_INIT;
  view.number = known.now.number;
  view.num_members = known.now.members.count();
  view.all_ok = static_cast<int32_t>(known.now.all_ok);
  view.first_step = known.now.first_step;
  view.last_step = known.now.last_step;
  std::ranges::copy(known.now.members.words(), view.members);
  std::ranges::copy(known.now.members.without(known.before.members).words(), view.joined);
  std::ranges::copy(known.before.members.without(known.now.members).words(), view.gone);
  return view;
}

void require_flag(const char* name, int32_t value) {
  XD_REQUIRE(value == 0 || value == 1, "args.", name, " = ", value, ", expected 0 or 1");
}

xd::Vote read_vote(const xd_comm_agree_args& args, const xd::Comm& comm) {
  require_flag("ok", args.ok);
  require_flag("leave", args.leave);
  xd::Vote vote;
  vote.step = args.step;
  vote.ok = args.ok;
  vote.leave = args.leave;
  if (args.leave_out == nullptr) return vote;
  xd::Members::Words words;
  std::copy_n(args.leave_out, words.size(), words.begin());
  vote.leave_out = xd::Members(words);
  const xd::Members unknown = vote.leave_out.without(xd::Members::all(comm.num_ranks()));
  XD_REQUIRE(unknown.count() == 0, "args.leave_out has rank ", unknown.lowest(),
             ", expected ranks 0 to ", comm.num_ranks() - 1);
  XD_REQUIRE(!vote.leave_out.has(comm.rank()),
             "args.leave_out has this rank itself, expected others: a rank leaves by args.leave");
  return vote;
}

}  // namespace

xd_status xd_comm_agree(xd_comm* comm, const xd_comm_agree_args* args, xd_view* view) {
  XD_REQUIRE_GIVEN("xd_comm_agree", comm);
  return guarded_on("xd_comm_agree", *comm->comm, [&] {
    xd::Comm& c = *comm->comm;
    c.errors().check_usable();
    const auto read = xd::read_struct("args", args, xd_comm_agree_args XD_COMM_AGREE_ARGS_INIT);
    XD_REQUIRE(read.timeout_ms >= 0, "args.timeout_ms = ", read.timeout_ms,
               ", expected at least 0");
    XD_REQUIRE(c.errors().masks_losses(),
               "the communicator has on_peer_loss = FATAL, expected MASK, as a rank that is lost "
               "finishes it otherwise");
    c.require_not_captured(read.stream);
    const xd::Vote vote = read_vote(read, c);
    if (view != nullptr) xd::check_struct("view", view);
    const int timeout_ms = read.timeout_ms != 0 ? read.timeout_ms : c.agree_timeout_ms();
    const xd::Views::Known known = c.views().agree(vote, timeout_ms);
    if (view != nullptr) xd::write_struct("view", view, as_told(known));
  });
}

xd_status xd_ep_group_enter_view(xd_ep_group* group, xd_stream stream) {
  return xd::operate("xd_ep_group_enter_view", group, XD_EP_ENTER_VIEW,
                     [&](xd::ep::Group& g) { g.enter_view(stream); });
}

xd_status xd_comm_get_view(xd_comm* comm, xd_view* view) {
  XD_REQUIRE_GIVEN("xd_comm_get_view", comm);
  XD_REQUIRE_GIVEN("xd_comm_get_view", view);
  return guarded_on("xd_comm_get_view", *comm->comm, [&] {
    comm->comm->errors().check_process();
    xd::write_struct("view", view, as_told(comm->comm->views().known()));
  });
}
