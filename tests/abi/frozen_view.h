/* The part of frozen.h, which includes it, that belongs to views and to ranks that are replaced. */
#ifndef CROSSDOCK_TESTS_ABI_FROZEN_VIEW_H_
#define CROSSDOCK_TESTS_ABI_FROZEN_VIEW_H_

FROZEN_VALUE(XD_BOOTSTRAP_JOIN, 4);
FROZEN_FIELD(xd_comm_config, elastic, 128);

FROZEN_VALUE(XD_VIEW_WORDS, 16);

FROZEN_SIZE(xd_view, 424);
FROZEN_FIELD(xd_view, struct_size, 0);
FROZEN_FIELD(xd_view, number, 8);
FROZEN_FIELD(xd_view, num_members, 16);
FROZEN_FIELD(xd_view, all_ok, 20);
FROZEN_FIELD(xd_view, first_step, 24);
FROZEN_FIELD(xd_view, last_step, 32);
FROZEN_FIELD(xd_view, members, 40);
FROZEN_FIELD(xd_view, joined, 168);
FROZEN_FIELD(xd_view, gone, 296);

FROZEN_SIZE(xd_comm_agree_args, 48);
FROZEN_FIELD(xd_comm_agree_args, struct_size, 0);
FROZEN_FIELD(xd_comm_agree_args, timeout_ms, 8);
FROZEN_FIELD(xd_comm_agree_args, ok, 12);
FROZEN_FIELD(xd_comm_agree_args, leave, 16);
FROZEN_FIELD(xd_comm_agree_args, step, 24);
FROZEN_FIELD(xd_comm_agree_args, leave_out, 32);
FROZEN_FIELD(xd_comm_agree_args, stream, 40);

FROZEN_VALUE(XD_EP_ENTER_VIEW, 10);
FROZEN_ENUM(xd_ep_peer_loss);
FROZEN_VALUE(XD_EP_PEER_LOSS_FATAL, 0);
FROZEN_VALUE(XD_EP_PEER_LOSS_RESUME, 1);
FROZEN_FIELD(xd_ep_config, on_peer_loss, 120);

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_VIEW_H_ */
