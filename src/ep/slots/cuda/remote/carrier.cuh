// The carrier: kernels that put the words for ranks on other machines into messages, and the words
// of their messages into this rank's own memory, where the near kernels look for them. Launches of
// a pipeline follow one another on the stream, so a carrier finds what the near kernel in front of
// it has stored, and the one behind it finds what the carrier has.
//
//   memory                         written by               read by
//   own area: ids[stage][rank],    the near kernel in       post()
//     bad_ids, entry, rows         front, as for itself
//   stand-ins: partials            likewise                 post(), which puts ones back
//   frames to neighbours           post(), post_weights()   the proxy, after `filled`
//   frames of neighbours           the network              land(), land_weights(), after `landed`
//   own area: ids, bad_ids, entry  land()                   the near kernel behind, as if the
//     rows, partials, weights of                            source had stored it
//     remote sources
//
// `filled` and `read` are stored with release (sys) by threads of the last block that is done: it
// has acquired what the others have counted (acq_rel, gpu), each behind a barrier of its block.
#pragma once

#include "ep/slots/cuda/remote/kernels.h"
#include "ep/slots/cuda/shared.cuh"
#include "ep/slots/cuda/words.cuh"

namespace xd::ep::cuda {

struct LlCarrierShared {
  bool last;
  // By neighbour, of its message: how many items, and the bytes of each behind its head.
  std::uint32_t items[kMaxDeviceRanks], item_bytes[kMaxDeviceRanks];
};

class LlCarrier {
 public:
  __device__ LlCarrier(const LlCarryParams& params, LlCarrierShared& shared)
      : p_(params.step),
        g_(params.group),
        r_(*params.remote),
        state_(*r_.state),
        s_(shared),
        kind_(params.step.kind),
        message_(kind_ == kLlDispatch ? LlRemoteKind::dispatch : LlRemoteKind::sums),
        map_(LlMessageMap::make(message_, g_.ids, g_.max_tokens)) {
    const ulonglong2 counts = ptx::ld_relaxed_sys_pair(&g_.counts[kind_][0]);
    sent_ = counts.x;
    taken_ = counts.y;
  }

  // All threads of all blocks. Where a wait fails, the near kernel behind finds that, too.
  __device__ void run() {
    const bool failed = device::failed(g_.comm);
    if (p_.weights && !failed) return carry_weights();
    if (p_.posts && (!failed || is_met_by_all()) && !post(failed)) return;
    if (failed) return;
    if (p_.gives_up && sent_ > taken_ && blockIdx.x == 0) give_up(taken_ + 1);
    if (p_.lands) land();
  }

 private:
  static constexpr int kAhead = 4;  // pairs of words that a lane loads together

  // ---- Frames ----

  __device__ std::byte* chunk(bool incoming, std::uint32_t frame) const {
    return r_.frames_at + r_.links.place(incoming, 0, frame) + sizeof(net::LinkHeader);
  }
  __device__ std::byte* chunk_to(int neighbour, std::uint64_t epoch) const {
    return chunk(false, r_.frame(neighbour, message_, epoch));
  }
  __device__ const std::byte* chunk_of(int neighbour, std::uint64_t epoch) const {
    return chunk(true, r_.frame(neighbour, message_, epoch));
  }
  __device__ bool may_fill(std::uint32_t frame, std::uint32_t use) const {
    return ll_may_fill(ptx::ld_acquire_sys(r_.words.freed + frame), use);
  }
  __device__ bool is_here(std::uint32_t frame, std::uint32_t use) const {
    return ll_is_here(ptx::ld_acquire_sys(r_.words.landed + frame), use);
  }
  __device__ std::uint32_t bytes_in(std::uint32_t frame) const {
    return net::bytes_of(ptx::ld_relaxed_sys(r_.words.landed + frame));
  }
  __device__ void send(std::uint32_t frame, std::uint32_t use, std::uint64_t bytes) const {
    state_.sent[frame] = use;
    ptx::st_release_sys(r_.words.filled + frame,
                        net::frame_word(use, static_cast<std::uint32_t>(bytes)));
  }
  // Gives a message back, or gives it up before it is here.
  __device__ void read(std::uint32_t frame, std::uint32_t use) const {
    if (ll_is_told(state_.read[frame], use)) return;
    state_.read[frame] = use;
    ptx::st_release_sys(r_.words.read + frame, net::frame_word(use, 0));
  }

  // ---- Waits ----

  __device__ device::KernelWait site(int phase, std::uint64_t epoch) const {
    return {phase, g_.number, kind_ == kLlDispatch ? XD_LL_DISPATCH : XD_LL_COMBINE, epoch};
  }
  // One thread for each neighbour waits until ready(neighbour). False in all threads of the block:
  // the communicator has failed.
  template <class Ready>
  __device__ bool wait_for_all(int phase, std::uint64_t epoch, Ready ready) const {
    const int n = thread_in_block();
    bool good = true;
    if (n < r_.num_neighbours) {
      good = device::wait_until(
          g_.comm, site(phase, epoch), r_.rank_of[n], [&] { return ready(n); },
          [=] { return epoch - 1; });
    }
    return __syncthreads_or(good ? 0 : 1) == 0;
  }
  // True if the communicator has been finished by an operation error that all ranks are to meet:
  // they hear of it by the record of this rank's operation.
  __device__ bool is_met_by_all() const {
    const DeviceBoard& board = *g_.comm.own_board;
    const std::uint32_t first = ptx::ld_acquire_sys(&board.first);
    return first != 0 && first <= static_cast<std::uint32_t>(g_.ranks()) &&
           board.record[first - 1].met_by_all != 0;
  }
  // Waits for a frame, also where the communicator has failed, for a timeout, but no more than a
  // second: then the peer does not read, and hears of it otherwise. One thread.
  template <class Ready>
  __device__ bool wait_failed(int neighbour, Ready ready) const {
    const auto most_ms = static_cast<std::uint64_t>(min(g_.comm.timeout_ms, 1000));
    const std::uint64_t deadline = ptx::global_timer_ns() + most_ms * 1000000;
    while (!ready()) {
      if (device::is_lost(g_.comm, r_.rank_of[neighbour])) return false;
      if (ptx::global_timer_ns() >= deadline) return false;
    }
    return true;
  }
  __device__ void refuse(int neighbour, std::uint64_t epoch) const {
    device::raise(g_.comm,
                  device::error_at(g_.comm, site(XD_PHASE_ROWS, epoch), XD_ERROR_INTERNAL,
                                   r_.rank_of[neighbour]),
                  device::Spread::everywhere);
  }
  // True in all threads of the last block that has done this part. The counter is zero again then.
  __device__ bool is_last(LlCarried part) {
    __syncthreads();
    std::uint32_t* const blocks = &state_.blocks[kind_][part];
    if (thread_in_block() == 0) {
      s_.last = ptx::add_acq_rel_gpu(blocks, 1) == gridDim.x - 1;
      if (s_.last) *blocks = 0;
    }
    __syncthreads();
    return s_.last;
  }

  // ---- Memory of the near kernels ----

  __device__ std::uint32_t stage(std::uint64_t epoch) const {
    return turn::pipeline_stage(epoch, g_.stages);
  }
  __device__ LlStaging staging(std::uint64_t epoch) const {
    return g_.staging(kind_, stage(epoch));
  }
  __device__ std::uint64_t cell(std::uint64_t epoch, int source) const {
    return std::uint64_t{stage(epoch)} * static_cast<std::uint64_t>(g_.ranks()) +
           static_cast<std::uint64_t>(source);
  }
  // The words of a source's record and its seal.
  __device__ std::uint64_t* entry(std::uint64_t epoch, int source) const {
    return reinterpret_cast<std::uint64_t*>(g_.own_area + g_.map.pipeline[kind_].entry) +
           cell(epoch, source) * LlPipeline::kWords;
  }
  __device__ std::uint64_t* bad_ids(std::uint64_t epoch, int source) const {
    return reinterpret_cast<std::uint64_t*>(g_.own_area + g_.map.bad_ids) + cell(epoch, source);
  }
  __device__ std::byte* ids(std::uint64_t epoch, int source) const {
    return g_.own_area + g_.map.ids + cell(epoch, source) * id_bytes();
  }
  __device__ std::uint64_t id_bytes() const {
    return static_cast<std::uint64_t>(g_.max_tokens) * static_cast<std::uint64_t>(g_.ids.words) * 8;
  }
  // Rows that a source may have here, or its sums.
  __device__ std::uint32_t places() const {
    return static_cast<std::uint32_t>(g_.max_tokens) *
           static_cast<std::uint32_t>(kind_ == kLlDispatch ? 1 : g_.partials_per_token());
  }
  __device__ std::byte* place_of(std::uint64_t epoch, int source, std::uint32_t place) const {
    const LlStaging rows = staging(epoch);
    const std::uint64_t first =
        kind_ == kLlDispatch ? static_cast<std::uint64_t>(source) * places() : 0;
    return rows.data + (first + place) * rows.stride;
  }

  // ---- Steps ----

  __device__ bool post(bool failed);
  __device__ void post_rows(std::uint64_t epoch);
  __device__ void post_ids(std::uint64_t epoch) const;
  __device__ void post_sums(std::uint64_t epoch);
  __device__ void send_all(std::uint64_t epoch);
  __device__ void give_up(std::uint64_t epoch) const;
  __device__ void land();
  __device__ bool await_messages(std::uint64_t epoch) const;
  __device__ bool look_at(int neighbour, std::uint64_t epoch) const;
  __device__ void land_entry(std::uint64_t epoch, int source, const LlRecord& record) const;
  __device__ bool land_ids(std::uint64_t epoch) const;
  __device__ bool land_ids_of(const std::byte* from, std::byte* to, std::uint64_t epoch) const;
  __device__ bool land_rows(std::uint64_t epoch) const;

  __device__ void carry_weights();
  __device__ bool weights_fit() const;
  __device__ bool post_weights(std::uint64_t epoch) const;
  __device__ bool give_up_weights(int neighbour, std::uint64_t epoch) const;
  __device__ bool needs_none(int neighbour, std::uint64_t epoch, bool& here) const;
  __device__ bool land_weights(std::uint64_t epoch) const;
  __device__ bool land_weights_of(int neighbour, std::uint64_t epoch) const;

  // ---- Copies, by all lanes of a warp ----

  // Copies vectors of 16 bytes to all places that lanes of `to` have. `frees`: puts ones back.
  __device__ void copy(std::byte* from, std::uint32_t vectors, std::byte* place, unsigned to,
                       bool frees) const {
#pragma unroll 1
    for (std::uint32_t first = lane_id(); first - lane_id() < vectors; first += 32 * kAhead) {
      ulonglong2 words[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * 32 < vectors) words[i] = load(from, first + i * 32);
      }
#pragma unroll 1
      for (unsigned left = to; left != 0; left &= left - 1) {
        const auto address = reinterpret_cast<unsigned long long>(place);
        auto* const at = reinterpret_cast<std::byte*>(
            __shfl_sync(kAllLanes, address, __ffs(static_cast<int>(left)) - 1));
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i * 32 < vectors)
            ptx::st_streaming_pair(at + (first + i * 32) * 16, words[i]);
        }
      }
#pragma unroll
      for (int i = 0; frees && i < kAhead; ++i) {
        if (first + i * 32 < vectors) put_back_pair(from + (first + i * 32) * 16);
      }
    }
  }
  __device__ static ulonglong2 load(const std::byte* from, std::uint32_t vector) {
    return ptx::ld_relaxed_sys_pair(from + std::uint64_t{vector} * 16);
  }
  __device__ static std::uint64_t load_word(const std::byte* from) {
    return ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(from));
  }
  __device__ static void store_head(std::byte* item, std::uint32_t place) {
    ptx::st_streaming_pair(item, make_ulonglong2(place, 0));
  }
  __device__ int warp() const {
    return static_cast<int>(blockIdx.x) * warps_per_block() + warp_in_block();
  }
  __device__ int warps() const { return static_cast<int>(gridDim.x) * warps_per_block(); }
  // Of threads of all blocks.
  __device__ int thread() const {
    return static_cast<int>(blockIdx.x) * threads_per_block() + thread_in_block();
  }
  __device__ int threads() const { return static_cast<int>(gridDim.x) * threads_per_block(); }

  const LlCarry& p_;
  const LlDevice& g_;
  const LlRemoteDevice& r_;
  LlRemoteState& state_;
  LlCarrierShared& s_;
  const int kind_;
  const LlRemoteKind message_;
  const LlMessageMap map_;
  std::uint64_t sent_, taken_;
};

// A message's header, from memory that the network writes: each word is loaded once.
__device__ inline LlRemoteHeader ll_header_in(const std::byte* chunk) {
  static_assert(sizeof(LlRemoteHeader) % sizeof(std::uint64_t) == 0);
  std::uint64_t words[sizeof(LlRemoteHeader) / sizeof(std::uint64_t)];
#pragma unroll
  for (std::size_t w = 0; w < sizeof(words) / sizeof(words[0]); ++w)
    words[w] = ptx::ld_relaxed_sys(reinterpret_cast<const std::uint64_t*>(chunk) + w);
  LlRemoteHeader header;
  memcpy(&header, words, sizeof(header));
  return header;
}

// ---- Messages that go --------------------------------------------------------------------------

// Sends the operation that the near kernel in front has sent. It has sent none where the call was
// refused; then all messages have gone already.
__device__ inline bool LlCarrier::post(bool failed) {
  const std::uint64_t epoch = sent_;
  if (epoch == 0) return true;
  const std::uint32_t use = r_.frames.use(epoch);
  if (ll_is_told(state_.sent[r_.frame(0, message_, epoch)], use)) return true;
  const auto is_free = [&](int n) { return may_fill(r_.frame(n, message_, epoch), use); };
  if (failed) {
    const int n = thread_in_block();
    const bool free = n >= r_.num_neighbours || wait_failed(n, [&] { return is_free(n); });
    if (__syncthreads_or(free ? 0 : 1) != 0) return false;
  } else if (!wait_for_all(XD_PHASE_CREDIT, epoch, is_free)) {
    return false;
  }
  if (kind_ == kLlDispatch) {
    post_ids(epoch);
    post_rows(epoch);
  } else {
    post_sums(epoch);
  }
  if (is_last(kLlPosted)) send_all(epoch);
  return true;
}

// Every remote rank counts the rows of all: it gets the ids of all tokens.
__device__ inline void LlCarrier::post_ids(std::uint64_t epoch) const {
  const std::byte* const from = ids(epoch, g_.rank());
  const auto vectors = static_cast<int>(id_bytes() / 16);
#pragma unroll 1
  for (int i = thread(); i < vectors * r_.num_neighbours; i += threads()) {
    const int n = i / vectors, vector = i % vectors;
    ptx::st_streaming_pair(chunk_to(n, epoch) + map_.ids + std::uint64_t(vector) * 16,
                           load(from, static_cast<std::uint32_t>(vector)));
  }
  if (thread() >= r_.num_neighbours) return;
  const std::uint64_t bad = ptx::ld_relaxed_sys(bad_ids(epoch, g_.rank()));
  ptx::st_streaming_pair(chunk_to(thread(), epoch) + map_.bad_ids, make_ulonglong2(bad, 0));
}

// A warp has a token. Rows that this rank receives itself stay; the others are free again.
__device__ inline void LlCarrier::post_rows(std::uint64_t epoch) {
  const std::uint64_t item = kLlItemHead + p_.item_bytes;
#pragma unroll 1
  for (int t = warp(); t < g_.max_tokens; t += warps()) {
    const std::byte* words = ids(epoch, g_.rank()) + std::uint64_t(t) * (g_.ids.words * 8);
    int rank = -1;
    if (lane_id() < g_.max_topk) {
      const std::uint64_t word = load_word(words + lane_id() / g_.ids.per_word * 8);
      const std::uint32_t id = g_.ids.id(word, lane_id() % g_.ids.per_word);
      if (id < static_cast<std::uint32_t>(g_.experts)) rank = static_cast<int>(g_.places[id] >> 16);
    }
    const int neighbour = rank >= 0 ? r_.neighbour_of[rank] : -1;
    const bool stays = __any_sync(kAllLanes, rank == g_.rank()) != 0;
    const bool leads = first_of_equals(static_cast<unsigned>(neighbour), neighbour >= 0);
    const unsigned to = __ballot_sync(kAllLanes, leads);
    if (to == 0) continue;
    std::byte* place = nullptr;
    if (leads) {
      const std::uint32_t number = atomicAdd(&state_.items[kind_][neighbour], 1u);
      place = chunk_to(neighbour, epoch) + map_.items + number * item;
      store_head(place, static_cast<std::uint32_t>(t));
      place += kLlItemHead;
    }
    copy(place_of(epoch, g_.rank(), static_cast<std::uint32_t>(t)), p_.item_bytes / 16, place, to,
         !stays);
  }
}

// All that the near kernel has stored into the stand-ins are sums. A damaged plan may have more of
// them than a message has room for: nobody waits for those.
__device__ inline void LlCarrier::post_sums(std::uint64_t epoch) {
  const std::uint64_t item = kLlItemHead + p_.item_bytes;
  const LlStaging sums = staging(epoch);
  const std::uint64_t offset = static_cast<std::uint64_t>(sums.data - g_.own_area);
  const std::uint32_t all = places() * static_cast<std::uint32_t>(r_.num_neighbours);
#pragma unroll 1
  for (auto first = static_cast<std::uint32_t>(warp()) * 32; first < all;
       first += static_cast<std::uint32_t>(warps()) * 32) {
    const std::uint32_t i = first + lane_id();
    const int neighbour = static_cast<int>(i / places());
    const std::uint32_t sum = i % places();
    std::byte *from = nullptr, *place = nullptr;
    bool lies_there = false;
    if (i < all) {
      from = r_.stand_in(neighbour) + offset + sum * sums.stride;
      lies_there = load_word(from) != kFree;
    }
    if (lies_there) {
      const std::uint32_t number = atomicAdd(&state_.items[kind_][neighbour], 1u);
      if (number < static_cast<std::uint32_t>(g_.max_tokens)) {
        place = chunk_to(neighbour, epoch) + map_.items + number * item;
        store_head(place, sum);
        place += kLlItemHead;
      }
    }
    const unsigned fits = __ballot_sync(kAllLanes, place != nullptr);
#pragma unroll 1
    for (unsigned left = __ballot_sync(kAllLanes, lies_there); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const auto address = reinterpret_cast<unsigned long long>(from);
      copy(reinterpret_cast<std::byte*>(__shfl_sync(kAllLanes, address, lane)), p_.item_bytes / 16,
           place, fits & 1u << lane, true);
    }
  }
}

// All threads of the last block. An operation that has failed is over for this rank: it has no use
// for its peers' messages. Where the communicator failed while the near kernel began, it has left
// no record, and peers hear of that as of any failure.
__device__ inline void LlCarrier::send_all(std::uint64_t epoch) {
  const std::uint64_t* const own = entry(epoch, g_.rank());
  LlRecord record;
  std::uint64_t words[turn::kRecordWords];
  for (int w = 0; w < turn::kRecordWords; ++w) words[w] = ptx::ld_relaxed_sys(own + w);
  if (ptx::ld_relaxed_sys(own + turn::kRecordWords) != epoch + turn::hash_of(words)) return;
  memcpy(&record, words, sizeof(record));
  const int n = thread_in_block();
  if (n < r_.num_neighbours) {
    std::uint32_t* const counter = &state_.items[kind_][n];
    const std::uint32_t items =
        min(ptx::ld_relaxed_sys(counter), static_cast<std::uint32_t>(g_.max_tokens));
    *counter = 0;
    *reinterpret_cast<LlRemoteHeader*>(chunk_to(n, epoch)) = {.epoch = epoch,
                                                              .kind = message_,
                                                              .source = g_.rank(),
                                                              .items = items,
                                                              .item_bytes = p_.item_bytes,
                                                              .record = record};
    send(r_.frame(n, message_, epoch), r_.frames.use(epoch),
         map_.items + items * (kLlItemHead + p_.item_bytes));
  }
  if (record.call.status != XD_SUCCESS) give_up(epoch);
}

// Threads of one block.
__device__ inline void LlCarrier::give_up(std::uint64_t epoch) const {
  const int n = thread_in_block();
  if (n < r_.num_neighbours) read(r_.frame(n, message_, epoch), r_.frames.use(epoch));
}

// ---- Messages that come ------------------------------------------------------------------------

__device__ inline void LlCarrier::land() {
  const std::uint64_t epoch = taken_ + 1;
  const bool is_next = p_.whole ? state_.whole[kind_] == epoch && sent_ == epoch : sent_ >= epoch;
  const std::uint32_t use = r_.frames.use(epoch);
  if (!is_next || ll_is_told(state_.read[r_.frame(0, message_, epoch)], use)) return;
  if (!await_messages(epoch)) return;
  const int n = thread_in_block();
  bool good = n >= r_.num_neighbours || look_at(n, epoch);
  if (__syncthreads_or(good ? 0 : 1) != 0) return;
  if (kind_ == kLlDispatch) good = land_ids(epoch);
  good &= land_rows(epoch);
  if (__syncthreads_or(good ? 0 : 1) != 0) return;
  if (is_last(kLlLanded) && n < r_.num_neighbours) read(r_.frame(n, message_, epoch), use);
}

__device__ inline bool LlCarrier::await_messages(std::uint64_t epoch) const {
  const bool times = p_.wait_ns != nullptr && blockIdx.x == 0;
  const std::uint64_t began = times ? ptx::global_timer_ns() : 0;
  const std::uint32_t use = r_.frames.use(epoch);
  return wait_for_all(XD_PHASE_ENTRY, epoch, [&](int n) {
    if (!is_here(r_.frame(n, message_, epoch), use)) return false;
    if (times) {
      p_.wait_ns[r_.rank_of[n]] += static_cast<std::int64_t>(ptx::global_timer_ns() - began);
    }
    return true;
  });
}

// One thread: looks whether a message can be, and brings its sender's record. False: it cannot.
__device__ inline bool LlCarrier::look_at(int neighbour, std::uint64_t epoch) const {
  const std::uint32_t frame = r_.frame(neighbour, message_, epoch);
  const std::uint64_t bytes = bytes_in(frame);
  const int source = r_.rank_of[neighbour];
  bool good = bytes >= map_.items;
  if (good) {
    const LlRemoteHeader h = ll_header_in(chunk(true, frame));
    good = h.epoch == epoch && h.kind == message_ && h.source == source &&
           h.items <= static_cast<std::uint32_t>(g_.max_tokens) && h.item_bytes % 16 == 0 &&
           h.item_bytes <= staging(epoch).stride &&
           bytes == map_.items + h.items * (kLlItemHead + h.item_bytes);
    s_.items[neighbour] = h.items;
    s_.item_bytes[neighbour] = h.item_bytes;
    if (good && blockIdx.x == 0) land_entry(epoch, source, h.record);
  }
  if (!good) refuse(neighbour, epoch);
  return good;
}

__device__ inline void LlCarrier::land_entry(std::uint64_t epoch, int source,
                                             const LlRecord& record) const {
  std::uint64_t words[turn::kRecordWords];
  memcpy(words, &record, sizeof(record));
  std::uint64_t* const to = entry(epoch, source);
  for (int w = 0; w < turn::kRecordWords; ++w) ptx::st_relaxed_sys(to + w, words[w]);
  ptx::st_relaxed_sys(to + turn::kRecordWords, epoch + turn::hash_of(words));
}

// A thread has a token of a source.
__device__ inline bool LlCarrier::land_ids(std::uint64_t epoch) const {
  const int words = g_.ids.words;
  bool good = true;
#pragma unroll 1
  for (int i = thread(); i < g_.max_tokens * r_.num_neighbours && good; i += threads()) {
    const int n = i / g_.max_tokens, source = r_.rank_of[n];
    const std::uint64_t offset = std::uint64_t(i % g_.max_tokens) * (words * 8);
    good = land_ids_of(chunk_of(n, epoch) + map_.ids + offset, ids(epoch, source) + offset, epoch);
    if (!good) refuse(n, epoch);
  }
  const int n = thread();
  if (n >= r_.num_neighbours) return good;
  const std::uint64_t bad = load_word(chunk_of(n, epoch) + map_.bad_ids);
  ptx::st_relaxed_sys(bad_ids(epoch, r_.rank_of[n]), bad);
  if (count_is_of(bad, epoch)) return good;
  refuse(n, epoch);
  return false;
}

// Receivers find places by ids, so none may be of no expert, or come twice. False: one is.
__device__ inline bool LlCarrier::land_ids_of(const std::byte* from, std::byte* to,
                                              std::uint64_t epoch) const {
  std::uint16_t seen[kMaxTopk];
  int count = 0;
  bool good = true;
#pragma unroll 1
  for (int w = 0; w < g_.ids.words; ++w) {
    const std::uint64_t word = load_word(from + w * 8);
    good &= word >> 48 == ll_tag(epoch);
#pragma unroll 1
    for (int k = 0; k < g_.ids.per_word && w * g_.ids.per_word + k < g_.max_topk; ++k) {
      const std::uint32_t id = g_.ids.id(word, k);
      if (id == g_.ids.none()) continue;
      good &= id < static_cast<std::uint32_t>(g_.experts);
#pragma unroll 1
      for (int j = 0; j < count; ++j) good &= seen[j] != id;
      seen[count++] = static_cast<std::uint16_t>(id);
    }
    ptx::st_relaxed_sys(reinterpret_cast<std::uint64_t*>(to + w * 8), word);
  }
  return good;
}

// A warp has an item.
__device__ inline bool LlCarrier::land_rows(std::uint64_t epoch) const {
  bool good = true;
  int first = warp();
#pragma unroll 1
  for (int n = 0; n < r_.num_neighbours; ++n) {
    const std::uint32_t bytes = s_.item_bytes[n];
    const auto items = static_cast<int>(s_.items[n]);
    std::byte* const from = const_cast<std::byte*>(chunk_of(n, epoch)) + map_.items;
#pragma unroll 1
    for (; first < items; first += warps()) {
      std::byte* const item = from + std::uint64_t(first) * (kLlItemHead + bytes);
      const auto place = static_cast<std::uint32_t>(load_word(item));
      if (place >= places()) {
        good = false;
        if (lane_id() == 0) refuse(n, epoch);
        continue;
      }
      copy(item + kLlItemHead, bytes / 16, place_of(epoch, r_.rank_of[n], place), 1u, false);
    }
    first -= items;  // the next source's items follow this one's
  }
  return good;
}

}  // namespace xd::ep::cuda
