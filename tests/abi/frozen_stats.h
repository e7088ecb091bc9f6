/* The part of frozen.h, which includes it, that belongs to stats.h. */
#ifndef CROSSDOCK_TESTS_ABI_FROZEN_STATS_H_
#define CROSSDOCK_TESTS_ABI_FROZEN_STATS_H_

FROZEN_SIZE(xd_stats, 224);
FROZEN_FIELD(xd_stats, struct_size, 0);
FROZEN_FIELD(xd_stats, calls, 8);
FROZEN_FIELD(xd_stats, call_ns, 72);
FROZEN_FIELD(xd_stats, failed_calls, 136);
FROZEN_FIELD(xd_stats, tokens, 144);
FROZEN_FIELD(xd_stats, token_bytes, 152);
FROZEN_FIELD(xd_stats, rows, 160);
FROZEN_FIELD(xd_stats, row_bytes, 168);
FROZEN_FIELD(xd_stats, bad_ids, 176);
FROZEN_FIELD(xd_stats, dropped_rows, 184);
FROZEN_FIELD(xd_stats, counts_rows, 192);
FROZEN_FIELD(xd_stats, measures_waits, 196);
FROZEN_FIELD(xd_stats, net_puts, 200);
FROZEN_FIELD(xd_stats, net_bytes, 208);
FROZEN_FIELD(xd_stats, staged_tensors, 216);

FROZEN_SIZE(xd_stats_source, 240);
FROZEN_FIELD(xd_stats_source, struct_size, 0);
FROZEN_FIELD(xd_stats_source, in_use, 8);
FROZEN_FIELD(xd_stats_source, rank, 12);
FROZEN_FIELD(xd_stats_source, num_ranks, 16);
FROZEN_FIELD(xd_stats_source, first_operation, 20);
FROZEN_FIELD(xd_stats_source, number, 24);
FROZEN_FIELD(xd_stats_source, device_type, 28);
FROZEN_FIELD(xd_stats_source, operation, 32);
FROZEN_FIELD(xd_stats_source, waits_for, 36);
FROZEN_FIELD(xd_stats_source, operation_ns, 40);
FROZEN_FIELD(xd_stats_source, comm, 48);
FROZEN_FIELD(xd_stats_source, name, 112);
FROZEN_FIELD(xd_stats_source, detail, 176);

FROZEN_VALUE(XD_STATS_OPERATIONS, 8);
FROZEN_VALUE(XD_STATS_TEXT_BYTES, 64);

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_STATS_H_ */
