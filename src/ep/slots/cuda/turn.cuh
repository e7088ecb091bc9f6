// One launch of an operation of low latency: what it does, whom it waits for, and what it reports.
//
// The numbers of its operations and the credits come first (begin). A rank's record says what its
// send half is. A send half stores its record and its words without waiting for those of peers;
// the receive half compares the records of all ranks. All blocks of a launch see the same counts
// and the same records, so all come to the same verdict; where ranks may be left out, one block
// decides for all (slots/cuda/agree.cuh).
//
// An operation that a rank takes without delivering it, since its own call has failed or records
// differ, waits for no rows: their words stay where they lie (slots/cuda/left.cuh).
#pragma once

#include "ep/slots/cuda/left.cuh"

namespace xd::ep::cuda {

template <class Params>
class LlTurn {
 public:
  __device__ LlTurn(const Params& params, LlShared& shared, int kind)
      : p_(params), g_(params.group), s_(shared), kind_(kind) {}

  // All lanes of one warp, which loads nothing else meanwhile. Its findings are behind the block's
  // next barrier.
  __device__ void begin();
  // The number of the operation that this launch sends, for a warp that stores words in front of
  // the block's first barrier. 0: it may not, since the launch does one half alone, or may leave
  // ranks out, or some credit is not there at the first look. begin() finds the same number. The
  // credits are acquired here, before what the warp stores then. All lanes, in groups of up to 32
  // ranks.
  __device__ std::uint64_t early_epoch() const;
  // One thread of every block, behind its first barrier: counts the launch's operations. The
  // pipeline's next launch begins when all of this one has ended, and does nothing if it has
  // failed.
  __device__ void end();
  // Called by one thread where this launch's send half has failed and is not received yet.
  __device__ void note_failed_send() const {
    g_.control->failed_send[kind_][stage(s_.course.send_epoch)] = s_.course.send_epoch;
  }
  // One thread of the last block, when the verdict is there: notes which of the operations that
  // this launch takes are not delivered.
  __device__ void note_left() const;

  __device__ LlPipeline pipeline() const { return ll_pipeline_of(g_, kind_, s_.area); }
  __device__ const LlDevice& group() const { return g_; }
  __device__ const LlCourse& course() const { return s_.course; }
  __device__ LlShared& shared() const { return s_; }
  __device__ bool is_last_block() const { return blockIdx.x == gridDim.x - 1; }
  __device__ int rank() const { return g_.comm.rank; }
  __device__ int ranks() const { return g_.comm.num_ranks; }
  __device__ std::uint32_t stage(std::uint64_t epoch) const {
    return turn::pipeline_stage(epoch, g_.stages);
  }
  __device__ device::KernelWait site(int phase, std::uint64_t epoch) const {
    return {phase, g_.number, p_.record.call.operation, epoch};
  }
  __device__ device::KernelWait credit_site(std::uint64_t epoch) const {
    device::KernelWait wait = site(XD_PHASE_CREDIT, epoch);
    wait.timeouts = ll_timeouts_of_credits(g_);
    return wait;
  }

  // All lanes of a warp: this launch's record, for every rank.
  __device__ void send_record(LlRecord record) const {
    record.mask = s_.masked;
    if (s_.course.status != XD_SUCCESS) {
      record.call.status = static_cast<std::uint8_t>(s_.course.status);
    }
    pipeline().send_record(record, s_.course.send_epoch);
  }
  // All lanes of a warp of the last block, behind its barrier.
  __device__ void give_credit() const { pipeline().give_credit({s_.freed, s_.before.sent}); }
  // The same warp, behind that.
  __device__ void free_left() const {
    if (s_.course.sends && s_.freed != s_.before.taken) ll_free_left(g_, s_, kind_);
  }

  // A part of begin(), where something is unusual. All lanes.
  __device__ void wait_credits() const;

  // Ranks that are left out now.
  __device__ bool leaves_out(int r) const { return g_.masks && s_.masked.has(r); }
  // Ranks whose part of the operation that is being received may come.
  __device__ bool is_source(int r) const { return !g_.masks || s_.company.has(r); }

  // See ll_goes_on().
  __device__ bool goes_on(int phase, std::uint64_t epoch, int peer, turn::LongWait& wait) const {
    return ll_goes_on(g_, s_, site(phase, epoch), peer, wait);
  }
  __device__ void accuse(int peer) const { ll_accuse(g_, s_, peer); }
  // Called by one thread of a block when all of it is over: tells what the operation has met, once
  // for all blocks.
  __device__ void report(std::uint64_t epoch, const LlFindings& findings, int status, int rank);

  // One warp: no record has come yet. Ranks that it was not sent to are gone from the beginning.
  __device__ void clear_sources() const {
#pragma unroll 1
    for (int r = lane_id(); r < ranks(); r += 32) {
      s_.gone[r] = is_source(r) ? 0 : 1;
      s_.record[r].call.operation = 0;
    }
    __syncwarp();
  }
  // Takes the records of all sources, if they come soon and the group does not mask. False: it has
  // taken some of them. All lanes.
  __device__ bool take_together(std::uint64_t epoch) const;
  // Waits for the record of a source; true if it has come. One thread.
  template <class GoesOn>
  __device__ bool take_record(int source, std::uint64_t epoch, GoesOn goes_on) const;
  // The operation goes without a source, and so do those behind it.
  __device__ void leave_out(int source) const {
    atomicExch(&s_.gone[source], 1);
    accuse(source);
  }
  // Adds the time for which a record has been waited for.
  __device__ void add_wait(int source, std::uint64_t began) const {
    if (p_.wait_ns == nullptr || p_.step.silent || source == rank()) return;
    p_.wait_ns[source] += static_cast<std::int64_t>(ptx::global_timer_ns() - began);
  }

  // The verdict about an operation, from the records of all sources that it has. All lanes of a
  // warp; the first one's `fits` counts: this rank's own receive half is good.
  __device__ void judge(bool fits) const;
  // In groups that mask: the last block tells the others what they follow (slots/cuda/agree.cuh).
  // All lanes of a warp.
  __device__ void tell_sources(std::uint64_t epoch) const { ll_tell_sources(g_, s_, kind_, epoch); }
  __device__ void follow_sources(std::uint64_t epoch) const {
    ll_follow_sources(g_, s_, kind_, site(XD_PHASE_ENTRY, epoch));
  }
  // True if the block has met something in an operation that tell() would tell.
  __device__ bool has_met() const {
    return s_.status != XD_SUCCESS || (s_.lost[0] | s_.lost[1]) != 0 || s_.bad_ids != 0;
  }
  // One thread of a block tells what the operation has met there, when it is over.
  __device__ void tell(std::uint64_t epoch);
  // The same about a call that takes no turn.
  __device__ void tell_refusal();
  // A mistake of this rank's call that its host has found and told is counted, too. One thread of
  // the launch.
  __device__ void count_mistake();

 private:
  __device__ LlCourse course_of(const turn::PipelineEpochs& before) const;
  // The operations that a launch takes besides its own: those whose send halves have failed, and
  // which come next. Any thread of every block.
  __device__ int taken_besides() const;
  __device__ void write_report(std::uint64_t epoch, const LlFindings& findings, int status,
                               int rank);
  __device__ void count_error(std::uint64_t epoch, int status, int rank);
  __device__ void lock_report() const {
    while (atomicCAS(&g_.control->reporting, 0u, 1u) != 0) {
    }
    __threadfence();
  }
  __device__ void unlock_report() const {
    __threadfence();
    atomicExch(&g_.control->reporting, 0u);
  }

  const Params& p_;
  const LlDevice& g_;
  LlShared& s_;
  const int kind_;
};

// It is no part of begin(), whose registers it would take. A turn whose address is taken lies in
// memory, so it makes one of its own.
template <class Params>
__device__ __noinline__ void ll_wait_credits(const Params& params, LlShared& shared, int kind) {
  LlTurn<Params>(params, shared, kind).wait_credits();
}

// Which rank's record differs from this rank's own. One thread.
inline __device__ __noinline__ void ll_compare_records(LlShared& s, int rank, int ranks) {
  const LlRecord& own = s.record[rank];
#pragma unroll 1
  for (int r = ranks - 1; r >= 0; --r) {
    if (s.gone[r] != 0 || r == rank) continue;
    const LlRecord& theirs = s.record[r];
    if (theirs.call.status == XD_SUCCESS && theirs.call.operation == own.call.operation &&
        same_operation(theirs, own)) {
      continue;
    }
    s.status = XD_ERROR_MISMATCH;
    s.status_rank = r;
  }
}

#define XD_LL_MEMBER(type) \
  template <class Params>  \
  __device__ inline type LlTurn<Params>

// ---- The start ---------------------------------------------------------------------------------

XD_LL_MEMBER(void)::begin() {
  // All loads are on their way before one of them is waited for. The credits come last, since
  // nothing passes an acquire.
  const turn::PipelineEpochs before = pipeline().epochs();
  const bool failed = device::failed(g_.comm);
  std::uint64_t left = 0;
  if (is_last_block()) left = ll_left_in_stage(g_, kind_);
  RankBits masked{};
  if (g_.masks && is_last_block()) {
    masked = {ptx::ld_relaxed_sys(&g_.control->masked[0]),
              ptx::ld_relaxed_sys(&g_.control->masked[1])};
  }
  const bool has_credit = p_.step.send && lane_id() < ranks() && lane_id() != rank();
  const std::uint64_t credit = has_credit ? pipeline().freed_by(lane_id()) : 0;
  if (lane_id() == 0) {
    s_.clear();
    s_.before = before;
    s_.freed = before.taken;
    s_.masked = masked;
    s_.course = course_of(before);
    s_.course.fatal = failed;
  }
  const bool lacks = has_credit && credit + static_cast<std::uint64_t>(g_.stages) <= before.sent;
  __syncwarp();
  const bool takes_turn = s_.course.sends || s_.course.receives;
  if (failed) {
    if (lane_id() == 0) device::tell_host(g_.comm);
  } else if (takes_turn) {
    const bool has_left = __any_sync(kAllLanes, left != 0) != 0;
    if (has_left) {
      const std::uint64_t freed = ll_freed_below(left, before.taken);
      if (lane_id() == 0) s_.freed = freed;
      __syncwarp();
    }
    if (g_.masks && !is_last_block()) {
      ll_follow_start(g_, s_, kind_, site(XD_PHASE_CREDIT, s_.course.send_epoch));
    }
    const bool waits = has_left || ranks() > 32 || (lacks && !leaves_out(lane_id()));
    if (s_.course.sends && __any_sync(kAllLanes, waits) != 0) {
      ll_wait_credits(p_, s_, kind_);
    }
    if (g_.masks && is_last_block()) ll_tell_start(g_, s_, kind_);
  }
  __syncwarp();
  if (lane_id() != 0) return;
  if (g_.masks) ll_begin_company(g_, s_, kind_);
  if (s_.failed != 0) s_.course.fatal = true;
}

XD_LL_MEMBER(std::uint64_t)::early_epoch() const {
  if (!p_.step.send || !p_.step.receive || p_.step.failed || g_.masks) return 0;
  const turn::PipelineEpochs before = pipeline().epochs();
  const bool failed = device::failed(g_.comm);
  const bool has_credit = lane_id() < ranks() && lane_id() != rank();
  const std::uint64_t credit = has_credit ? pipeline().freed_by(lane_id()) : 0;
  const bool enough = !has_credit || credit + static_cast<std::uint64_t>(g_.stages) > before.sent;
  const bool takes_turn = before.sent == before.taken && !failed;
  const bool may = __all_sync(kAllLanes, enough && takes_turn) != 0;
  __syncwarp();  // the acquires of all lanes come before what any of them stores
  return may ? before.sent + 1 : 0;
}

XD_LL_MEMBER(LlCourse)::course_of(const turn::PipelineEpochs& before) const {
  const LlStep& step = p_.step;
  LlCourse c{};
  c.send_epoch = before.sent + 1;
  c.take_epoch = before.taken + 1;
  const std::uint64_t open = before.sent - before.taken;
  c.got = static_cast<std::int64_t>(open);
  // A call that does both halves has its receive half next.
  if (step.send && step.receive && open != 0) {
    c.status = XD_ERROR_INVALID_ARGUMENT;
    c.fault = LlFault::both_between;
    return c;
  }
  if (step.send && open >= static_cast<std::uint64_t>(g_.in_flight)) {
    c.status = XD_ERROR_BUSY;
    c.fault = LlFault::busy;
    return c;
  }
  if (!step.send && open == 0) {
    c.status = step.silent ? XD_SUCCESS : XD_ERROR_INVALID_ARGUMENT;
    c.fault = LlFault::no_send;
    return c;
  }
  c.sends = step.send;
  c.rows = step.send && !step.failed;
  // A call that has failed is the whole operation. Its receive half comes when it is its turn.
  c.receives = step.failed ? open == 0 : step.receive;
  c.leaves = step.failed || step.silent;
  return c;
}

// All lanes, where some credit was not there at the first look, or words were left. The last block
// gives this rank's own behind the block's barrier; but here at once, since the peers may wait for
// it likewise. It also waits for what peers say about the stages that it fills
// (slots/cuda/left.cuh).
XD_LL_MEMBER(void)::wait_credits() const {
  const std::uint64_t epoch = s_.before.sent + 1;
  const auto stages = static_cast<std::uint64_t>(g_.stages);
  const std::uint64_t left = is_last_block() ? ll_last_freed(g_, kind_, epoch) : 0;
  const auto has_taken = [&](int r) {
    return r == rank() || leaves_out(r) ||
           (pipeline().freed_by(r) + stages >= epoch &&
            (left == 0 || pipeline().sent_by(r) >= left));
  };
  bool all = true;
#pragma unroll 1
  for (int r = lane_id(); r < ranks(); r += 32) all &= has_taken(r);
  if (__all_sync(kAllLanes, all) != 0) return;
  if (is_last_block()) {
    ll_pipeline_of(g_, kind_, g_.areas).give_credit({s_.freed, s_.before.sent});
  }
  turn::LongWait wait;  // one for all of a lane's ranks
#pragma unroll 1
  for (int r = lane_id(); r < ranks(); r += 32) {
    wait.peer_is_lost = false;
    const bool good =
        turn::poll_until([&] { return has_taken(r); },
                         [&] { return ll_goes_on(g_, s_, credit_site(epoch), r, wait); });
    if (!good && !g_.masks) s_.failed = 1;
  }
  ll_mask_lost(s_);
}

// The time for which each source is waited for is asked for one by one.
XD_LL_MEMBER(bool)::take_together(std::uint64_t epoch) const {
  if (g_.masks || p_.wait_ns != nullptr) return false;
  const int word_at = LlPipeline::word_of_pipeline();
  const std::uint64_t factor = turn::seal_factor(word_at);
#pragma unroll 1
  for (int first = 0; first < ranks(); first += LlPipeline::kTogether) {
    std::uint64_t word = 0;
    if (!pipeline().look_together(first, epoch, factor, word, [](int) { return true; }))
      return false;
    const int source = first + lane_id() / LlPipeline::kWords;
    if (source < ranks() && word_at < turn::kRecordWords) {
      reinterpret_cast<std::uint64_t*>(&s_.record[source])[word_at] = word;
    }
  }
  __syncwarp();  // each lane has written words that others read
  return true;
}

// A rank that has masked this one sends its record all the same, perhaps that of a later operation.
template <class Params>
template <class GoesOn>
__device__ inline bool LlTurn<Params>::take_record(int source, std::uint64_t epoch,
                                                   GoesOn goes_on) const {
  std::uint64_t number = 0;
  LlRecord record;
  bool accused = false;
  const bool here = turn::poll_until(
      [&] {
        if (!pipeline().read_words(source, epoch, record, number)) return false;
        accused = g_.masks && record.mask.has(rank());
        return accused || number == epoch;
      },
      goes_on);
  if (!here) return false;
  if (accused) {
    const auto bit = 1ull << (source % 64);
    atomicOr(&s_.accusers[source / 64], bit);
    ptx::or_relaxed_gpu(&g_.control->masked_by[source / 64], bit);
    leave_out(source);
    return false;
  }
  s_.record[source] = record;
  return true;
}

// ---- The end -----------------------------------------------------------------------------------

XD_LL_MEMBER(int)::taken_besides() const {
  if (!s_.course.receives) return 0;
  const std::uint64_t sent = s_.before.sent + (s_.course.sends ? 1 : 0);
  int count = 0;
#pragma unroll 1
  for (std::uint64_t next = s_.course.take_epoch + 1; next <= sent; ++next, ++count) {
    if (g_.control->failed_send[kind_][stage(next)] != next) break;
  }
  return count;
}

XD_LL_MEMBER(void)::note_left() const {
  const LlCourse& c = s_.course;
  if (!c.receives || c.fatal || s_.failed != 0) return;
  const int last = taken_besides();
#pragma unroll 1
  for (int i = s_.verdict == static_cast<int>(LlVerdict::go) ? 1 : 0; i <= last; ++i) {
    const std::uint64_t epoch = c.take_epoch + static_cast<std::uint64_t>(i);
    g_.control->left[kind_][stage(epoch)] = epoch;
  }
}

XD_LL_MEMBER(void)::end() {
  const LlCourse& c = s_.course;
  if (c.fatal || s_.failed != 0) return;
  const turn::PipelineEpochs now{
      s_.before.sent + (c.sends ? 1 : 0),
      s_.before.taken + (c.receives ? 1 + static_cast<std::uint64_t>(taken_besides()) : 0)};
  if (now.sent != s_.before.sent || now.taken != s_.before.taken) {
    pipeline().end(now, g_.most_blocks);
  }
}

// Mostly the records are equal in all that must be, and each lane looks at one rank's.
XD_LL_MEMBER(void)::judge(bool fits) const {
  static_assert(offsetof(LlRecord, tokens) == 3 * sizeof(std::uint64_t));
  const auto* own = reinterpret_cast<const std::uint64_t*>(&s_.record[rank()]);
  bool same = true;
#pragma unroll 1
  for (int r = lane_id(); r < ranks(); r += 32) {
    const auto* theirs = reinterpret_cast<const std::uint64_t*>(&s_.record[r]);
    same &= s_.gone[r] != 0 || (theirs[0] == own[0] && theirs[1] == own[1] && theirs[2] == own[2]);
  }
  same = __all_sync(kAllLanes, same) != 0;
  if (lane_id() != 0) return;
  s_.status = XD_SUCCESS;
  s_.status_rank = -1;
  if (!same) ll_compare_records(s_, rank(), ranks());
  const bool goes = fits && s_.status == XD_SUCCESS;
  s_.verdict = static_cast<int>(goes ? LlVerdict::go : LlVerdict::leave);
}

// Called by one thread of every block that has met something.
XD_LL_MEMBER(void)::report(std::uint64_t epoch, const LlFindings& findings, int status, int rank) {
  LlControl* control = g_.control;
  // One block reports an operation. An operation error of a call that takes no turn has no number.
  lock_report();
  volatile std::uint64_t* reported = &control->reported[kind_][stage(epoch)];
  if (epoch == 0 || *reported != epoch) {
    if (epoch != 0) *reported = epoch;
    write_report(epoch, findings, status, rank);
    count_error(epoch, epoch != 0 ? status : XD_SUCCESS, rank);
  }
  unlock_report();
}

XD_LL_MEMBER(void)::tell(std::uint64_t epoch) {
  if (s_.failed != 0) return;
  // Where nothing is delivered only the block that has decided knows why.
  const bool go = s_.verdict == static_cast<int>(LlVerdict::go);
  if (g_.masks && !go && !s_.course.leaves && !is_last_block()) return;
  const unsigned long long low = s_.lost[0], high = s_.lost[1];
  const bool has_lost = (low | high) != 0;
  if (s_.status != XD_SUCCESS) {
    report(epoch, s_.findings, s_.status, s_.status_rank);
  } else if (has_lost) {
    report(epoch, {}, XD_ERROR_PEER_LOST, low != 0 ? __ffsll(low) - 1 : 63 + __ffsll(high));
  } else if (s_.bad_ids != 0 && s_.bad_id_rank >= 0) {
    LlFindings findings{};
    findings.bad_ids = s_.bad_ids;
    report(epoch, findings, XD_ERROR_INVALID_ARGUMENT, s_.bad_id_rank);
  }
}

XD_LL_MEMBER(void)::tell_refusal() {
  const LlCourse& c = s_.course;
  LlFindings findings{};
  findings.kind = c.fault;
  findings.got = c.got;
  report(0, findings, c.status, rank());
}

XD_LL_MEMBER(void)::write_report(std::uint64_t epoch, const LlFindings& findings, int status,
                                 int rank) {
  LlReport* to = g_.report;
  const std::uint32_t written = ptx::ld_relaxed_sys(&to->written);
  if (written == ptx::ld_acquire_sys(&to->taken)) {
    to->status = status;
    to->operation = p_.record.call.operation;
    to->epoch = epoch;
    to->rank = rank;
    to->findings = findings;
    if (status == XD_ERROR_MISMATCH) {
#pragma unroll 1
      for (int r = 0; r < ranks(); ++r) {
        to->record[r] = s_.record[r];
        if (s_.gone[r] != 0) to->record[r].call.operation = 0;
      }
    }
    ptx::st_release_sys(&to->written, written + 1);
  }
  if (g_.masks) {
    to->masked = {g_.control->masked[0], g_.control->masked[1]};
    to->masked_by = {g_.control->masked_by[0], g_.control->masked_by[1]};
  }
}

XD_LL_MEMBER(void)::count_mistake() {
  lock_report();
  const bool takes_turn = p_.step.failed && s_.course.sends;
  count_error(s_.course.send_epoch, takes_turn ? p_.record.call.status : XD_SUCCESS, rank());
  unlock_report();
}

// XD_SUCCESS: an error that finishes nothing.
XD_LL_MEMBER(void)::count_error(std::uint64_t epoch, int status, int rank) {
  LlReport* to = g_.report;
  ptx::st_release_sys(&to->errors, ++g_.control->errors);
  if (!g_.fatal_errors || status == XD_SUCCESS || status == XD_ERROR_PEER_LOST) return;
  FatalError error = device::error_at(g_.comm, site(XD_PHASE_NONE, epoch), status, rank);
  error.met_by_all = 1;
  to->fatal_launch = p_.step.launch;
  device::raise(g_.comm, error, device::Spread::here);
}

#undef XD_LL_MEMBER

}  // namespace xd::ep::cuda
