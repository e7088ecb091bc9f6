// prepare: counts first, then rows.
//
//   1  this rank's choices, and how many there are per expert and rank (Choices)
//   2  exchange counts; every rank derives every zone, every overflow and its own first rows
//      (Placement)
//   3  number this rank's rows in (token, k) order (Numbering); in EXPERT_MAJOR tell each rank that
//      stages which of its rows are one token's
//   4  RANK_MAJOR under DROP: tell each rank that overflows what it still gets per expert
//
// Each step makes a value that later steps only read; the memory of all is the group's Scratch.
#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "base/math.h"
#include "ep/bulk/cpu/operations.h"
#include "ep/bulk/cpu/remote/rows.h"
#include "ep/bulk/family.h"

namespace xd::ep::cpu {
namespace {

// Writes values into an optional int32 or int64 output. A value that does not fit into 32 bits
// becomes the largest number that does.
template <class Value>
void write_numbers(const Tensor& out, std::int64_t count, Value&& value) {
  if (!out) return;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t v = value(i);
    if (out.type == DType::i64) {
      out.as<std::int64_t>()[i] = v;
    } else {
      out.as<std::int32_t>()[i] = static_cast<std::int32_t>(std::min<std::int64_t>(v, INT32_MAX));
    }
  }
}

// Words for ranks on other machines, cut into chunks for their relays.
class WordChunks {
 public:
  explicit WordChunks(const RemoteSide& side)
      : room_(side.chunk_room()),
        pieces_(side.routes().neighbours().size()),
        chunks_(pieces_.size()),
        used_(pieces_.size()) {}

  // A relay gets a chunk, if only an empty one.
  void open(int relay) { chunks_[at(relay)] = std::max(chunks_[at(relay)], 1U); }
  void add(int relay, RemoteWords area, int owner, std::span<const std::uint32_t> words) {
    std::size_t& used = used_[at(relay)];
    for (std::size_t first = 0; first < words.size();) {
      const auto piece =
          words.subspan(first, std::min(room_ / 2 / sizeof(words[0]), words.size() - first));
      if (used + bytes_of(piece) > room_) {
        ++chunks_[at(relay)];
        used = 0;
      }
      used += bytes_of(piece);
      pieces_[at(relay)].push_back({.head = {.area = area,
                                             .owner = owner,
                                             .first = static_cast<std::uint32_t>(first),
                                             .count = static_cast<std::uint32_t>(piece.size())},
                                    .words = piece,
                                    .chunk = chunks_[at(relay)] - 1});
      first += piece.size();
    }
  }

  std::span<const std::uint32_t> chunks() const { return chunks_; }  // by neighbour
  RemoteHands::Filled fill(int relay, std::uint32_t chunk, std::byte* room) const {
    RemoteHands::Filled filled;
    for (const Piece& piece :
         std::ranges::equal_range(pieces_[at(relay)], chunk, {}, &Piece::chunk)) {
      std::byte* const to = room + filled.bytes;
      std::memcpy(to, &piece.head, sizeof(piece.head));
      std::memcpy(to + sizeof(piece.head), piece.words.data(), piece.words.size_bytes());
      filled.bytes += bytes_of(piece.words);
      ++filled.items;
    }
    return filled;
  }

 private:
  struct Piece {
    WordsItem head;
    std::span<const std::uint32_t> words;
    std::uint32_t chunk;
  };
  static std::size_t bytes_of(std::span<const std::uint32_t> words) {
    return sizeof(WordsItem) + net::item_size(words.size_bytes());
  }

  const std::size_t room_;
  std::vector<std::vector<Piece>> pieces_;  // by neighbour, in the order of chunks
  std::vector<std::uint32_t> chunks_;
  std::vector<std::size_t> used_;  // of the last chunk
};

}  // namespace

PrepareOp::PrepareOp(const Context& context, const PrepareCall& call)
    : context_(context),
      call_(call),
      tokens_(static_cast<int>(call_.topk_idx.rows)),
      topk_(static_cast<int>(call_.topk_idx.cols)) {
  RemoteSide* const side = context_.lockstep.remote();
  if (side == nullptr) return;
  std::vector<std::uint32_t>& chunks = side->items().chunks;
  std::ranges::fill(chunks, 0U);
  for (const int d : side->ranks())
    if (may_send_words(d)) chunks[at(side->relay_for(d))] = kUnknownChunks;
  side->announce(chunks);
}

Record PrepareOp::record() const {
  Record record = record_of(call_);
  record.fingerprint = context_.group.slot_table().hash();
  return record;
}

// Up to where its list begins.
PlanMap PrepareOp::plan_map() const {
  return PlanMap::make({.local_experts = config().local_experts,
                        .tokens = tokens_,
                        .topk = topk_,
                        .list_rows = 0,
                        .items = 0,
                        .ranks = config().ranks,
                        .parts = call_.parts});
}

void PrepareOp::stage_in() {
  // These bytes may have been a plan before; they are none from now on.
  std::memset(call_.plan, 0, sizeof(PlanHeader));
  choices_ =
      read_choices(call_.topk_idx, config(),
                   {context_.group.slot_table(), call_.replica_hint, context_.group.members()},
                   context_.scratch.choices);
}

void PrepareOp::announce() { context_.lockstep.send_counts(choices_.counts); }

void PrepareOp::move() {
  const CountTable counts = gather_counts();
  fingerprint_ = fingerprint_of(counts);
  context_.scratch.placement.place(counts, config(), context_.group.capacities(),
                                   {context_.group.rank(), call_.alignment, call_.parts});
  Numbering numbering = begin_numbering();
  numbering.number(choices_, reinterpret_cast<std::uint32_t*>(call_.plan + plan_map().code));
  if (tells_kept()) send_kept(numbering.kept());
  if (RemoteSide* const remote = context_.lockstep.remote()) {
    send_remote(*remote, tells_kept() ? numbering.kept() : std::span<const std::uint32_t>());
  }
}

// The same for ranks on other machines: their relays write it into those ranks' memory.
void PrepareOp::send_remote(RemoteSide& side, std::span<const std::uint32_t> kept) const {
  WordChunks words(side);
  const ExpertMap& map = config().map();
  for (const int d : side.ranks()) {
    if (may_send_words(d)) words.open(side.relay_for(d));
    if (context_.group.config_of(d).keeps.lists) {
      const std::span<const std::uint32_t> list = side.list_for(d);
      words.add(side.relay_for(d), RemoteWords::list, d, list.first(at(std::int64_t{1} + list[0])));
    }
    if (!kept.empty() && placement().total[at(d)] > capacity_of(d)) {
      words.add(side.relay_for(d), RemoteWords::kept, d,
                kept.subspan(at(map.first(d)), at(map.local_experts(d))));
    }
  }
  const RemoteRows remote(
      side, RemoteKind::words, words.chunks(),
      [&](int relay, std::uint32_t chunk, std::byte* room) {
        return words.fill(relay, chunk, room);
      },
      [&](const RemoteHeader& header, std::span<const std::byte> items) {
        bring_words(header, items);
      });
  side.finish();
}

void PrepareOp::bring_words(const RemoteHeader& header, std::span<const std::byte> items) const {
  const auto require = [&](bool good, const char* why) {
    if (!good) refuse_chunk(header, items.size(), why);
  };
  while (!items.empty()) {
    WordsItem head{};
    require(items.size() >= sizeof(head), "its last words are cut");
    std::memcpy(&head, items.data(), sizeof(head));
    const std::size_t size = sizeof(head) + net::item_size(head.count * sizeof(std::uint32_t));
    const auto owner =
        std::ranges::find(context_.group.near(), head.owner, [](NearRank r) { return int{r}; });
    require(items.size() >= size, "it has fewer words than it says");
    require(owner != context_.group.near().end(), "its words are for no rank here");
    const bool lists = head.area == RemoteWords::list;
    // Words that an owner does not keep have no bytes there (GroupMap).
    require(lists ? context_.group.config_of(*owner).keeps.lists
                  : head.area == RemoteWords::kept && tells_kept(),
            "their owner keeps no such words");
    const std::uint64_t room = lists ? GroupMap::list_words(config())
                                     : static_cast<std::uint64_t>(config().most_local_experts());
    require(std::uint64_t{head.first} + head.count <= room, "its words have no room here");
    std::uint32_t* const to = lists ? list_of(*owner, header.source).array<std::uint32_t>()
                                    : kept_of(*owner, header.source);
    std::memcpy(to + head.first, items.data() + sizeof(head), head.count * sizeof(std::uint32_t));
    items = items.subspan(size);
  }
}

CountTable PrepareOp::gather_counts() const {
  const CountLayout layout{config().experts, config().ranks};
  const std::span<std::uint32_t> table = context_.scratch.table;
  std::ranges::copy(choices_.counts,
                    table.subspan(at(context_.group.rank()) * layout.size()).begin());
  context_.lockstep.await_counts(table);
  return {layout, table};
}

std::uint64_t PrepareOp::fingerprint_of(const CountTable& counts) const {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < counts.values.size(); ++i) hash += hash_entry(i, counts.values[i]);
  return plan_fingerprint({.counts = hash,
                           .capacities = context_.group.plan_binding().capacities,
                           .hosts = context_.group.plan_binding().hosts,
                           .topk = topk_,
                           .alignment = call_.alignment,
                           .group = context_.group.number(),
                           .epoch = context_.lockstep.epoch(),
                           .parts = call_.parts});
}

// With this rank's lists, still empty, in the ranks that keep some.
Numbering PrepareOp::begin_numbering() const {
  Numbering numbering({.config = config(),
                       .codec = context_.group.codec(),
                       .capacities = context_.group.capacities(),
                       .alignment = call_.alignment},
                      placement(), context_.scratch.numbering);
  for (const NearRank d : context_.group.near()) {
    if (!context_.group.config_of(d).keeps.lists || !context_.lockstep.takes_part(d)) continue;
    numbering.open_list(d, list_of(d, context_.group.rank()).array<std::uint32_t>());
  }
  if (RemoteSide* const remote = context_.lockstep.remote()) {
    for (const int d : remote->ranks())
      if (context_.group.config_of(d).keeps.lists)
        numbering.open_list(d, remote->list_for(d).data());
  }
  return numbering;
}

// Into each rank that overflows: this rank's surviving choices of that rank's experts. Covered by
// this operation's done flag.
void PrepareOp::send_kept(std::span<const std::uint32_t> kept) const {
  const ExpertMap& map = config().map();
  for (const NearRank d : context_.group.near()) {
    if (placement().total[at(d)] <= capacity_of(d)) continue;
    std::ranges::copy(kept.subspan(at(map.first(d)), at(map.local_experts(d))),
                      kept_of(d, context_.group.rank()));
  }
}

// The rows that a source has left of each of the owner's experts, in the owner's memory.
std::uint32_t* PrepareOp::kept_of(NearRank owner, int source) const {
  const NearMemory area = context_.lockstep.area_of(owner, context_.lockstep.map_of(owner).kept);
  return area.array<std::uint32_t>() + at(source) * at(config().most_local_experts());
}

NearMemory PrepareOp::list_of(NearRank owner, int source) const {
  const NearMemory area = context_.lockstep.area_of(owner, context_.lockstep.map_of(owner).lists);
  return area.from(at(source) * GroupMap::list_words(config()) * sizeof(std::uint32_t));
}

// Every source's list, one after another; returns how many rows there are.
std::int64_t PrepareOp::collect_lists() const {
  if (!config().keeps.lists) return 0;
  const PlanMap map = plan_map();
  auto* to = reinterpret_cast<std::uint32_t*>(call_.plan + map.list);
  std::int64_t rows = 0;
  for (const int s : context_.group.ranks()) {
    if (!context_.lockstep.takes_part(s)) continue;
    const auto* list = list_of(context_.group.self(), s).array<std::uint32_t>();
    const std::int64_t count = std::min<std::int64_t>(
        {*list, static_cast<std::int64_t>(config().rows_per_source()), config().capacity - rows});
    std::copy_n(list + 1, count, to + rows);
    rows += count;
  }
  return rows;
}

void PrepareOp::collect_kept() {
  Scratch& scratch = context_.scratch;
  const NearRank self = context_.group.self();
  std::ranges::fill(scratch.kept_pairs, 0);
  for (const int s : context_.group.ranks()) {
    if (!context_.lockstep.takes_part(s)) continue;
    const std::uint32_t* kept = kept_of(self, s);
    for (std::size_t e = 0; e < scratch.kept_pairs.size(); ++e) scratch.kept_pairs[e] += kept[e];
  }
  scratch.placement.cut_pairs(scratch.kept_pairs, call_.alignment);
}

OperationError PrepareOp::complete() {
  if (tells_kept() && placement().dropped_rows > 0) collect_kept();
  write_zones();
  write_header();
  write_outputs();
  context_.group.count_bad_ids(placement().bad_ids);
  context_.group.count_unplaced(choices_.unplaced);
  if (config().logical_experts > 0) {
    context_.scratch.loads.add({{config().experts, config().ranks}, context_.scratch.table},
                               context_.group.slot_table());
  }
  if (drops()) context_.group.count_dropped_rows(placement().dropped_rows);
  context_.order.resume();
  return report();
}

void PrepareOp::write_zones() const {
  const PlanMap map = plan_map();
  const auto clip = [](std::int64_t v) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(v, INT32_MAX));
  };
  auto* count = reinterpret_cast<std::int32_t*>(call_.plan + map.count);
  auto* offset = reinterpret_cast<std::int32_t*>(call_.plan + map.offset);
  std::ranges::transform(placement().count, count, clip);
  std::ranges::transform(placement().offset, offset, clip);
  if (call_.parts == 1) return;
  auto* part_end = reinterpret_cast<std::int32_t*>(call_.plan + map.part_end);
  const std::span part_ends(placement().part_end);
  std::ranges::transform(part_ends.first(at(config().ranks) * at(call_.parts - 1)), part_end, clip);
}

void PrepareOp::write_header() const {
  const Placement& p = placement();
  const bool overflows = p.overflow_rank >= 0;
  PlanHeader header{};
  header.rank = context_.group.rank();
  header.ranks = config().ranks;
  header.experts = config().experts;
  header.local_experts = config().local_experts;
  header.expert_ranks = config().expert_tables.hash();
  header.hosts = context_.group.plan_binding().hosts;
  header.tokens = tokens_;
  header.topk = topk_;
  header.layout = config().layout.id;
  header.alignment = call_.alignment;
  header.overflow = config().overflow;
  header.keeps_list = config().keeps.lists ? 1 : 0;
  if (call_.parts > 1) {
    header.version = PlanHeader::kHasParts;  // sealing adds the number
    header.keeps_list |= call_.parts << PlanHeader::kPartsShift;
  }
  header.list_rows = collect_lists();
  header.bad_id_rank = p.bad_id_rank;
  header.overflow_rank = p.overflow_rank;
  header.recv_rows = p.recv_rows;
  header.total_rows = p.total[at(header.rank)];
  header.bad_ids = p.bad_ids;
  header.overflow_needed = overflows ? p.total[at(p.overflow_rank)] : 0;
  header.overflow_capacity = overflows ? capacity_of(p.overflow_rank) : 0;
  header.capacities = context_.group.plan_binding().capacities;
  header.capacity = config().capacity;
  header.fingerprint = fingerprint_;
  header.epoch = context_.lockstep.epoch();
  std::memcpy(call_.plan, &header, sizeof(header));
  seal_plan(call_.plan);
}

void PrepareOp::write_outputs() const {
  const Placement& p = placement();
  const std::int64_t local = config().local_experts;
  const std::int64_t ranks = config().ranks;
  write_numbers(call_.counts, local, [&](std::int64_t e) { return p.count[at(e)]; });
  write_numbers(call_.padded_counts, local,
                [&](std::int64_t e) { return p.offset[at(e + 1)] - p.offset[at(e)]; });
  write_numbers(call_.offsets, local + 1, [&](std::int64_t e) { return p.offset[at(e)]; });
  write_numbers(call_.total, 1, [&](std::int64_t) { return p.total[at(context_.group.rank())]; });
  write_numbers(call_.rank_rows, ranks * ranks, [&](std::int64_t i) { return p.rank_rows[at(i)]; });
}

OperationError PrepareOp::report() const {
  const Placement& p = placement();
  const PlanView plan = PlanView::open(call_.plan, plan_size(config()));
  if (OperationError found = overflow_of(plan)) return found;
  if (p.bad_ids == 0) return {};
  return bad_expert_ids<Family>(p.bad_ids, p.bad_id_rank, config());
}

}  // namespace xd::ep::cpu
