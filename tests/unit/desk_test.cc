// All ways in which desks of several machines can play together: an exhaustive search over every
// order in which chunks and credits arrive, hands finish, and ranks go on. Mutants show what it
// would find.
#include "ep/bulk/desk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "base/hash.h"
#include "base/math.h"

namespace xd::ep {
namespace {

constexpr int kMost = 3;  // machines, each with one rank: partner p of a rank is the rank p
constexpr int kMostFrames = 3;

// chunks[from][to], as rows or as requests.
struct Problem {
  int ranks, frames, hands;
  bool requests;
  std::uint8_t chunks[kMost][kMost];
  // The last two frames to a relay have brought an entry and counts, and are on their way back.
  bool announced = false;
  bool unknown = false;  // the headers alone say how many there are
};

// A frame of a rank for another one.
struct Frame {
  enum State : std::uint8_t { free, filling, flying, landed, credited };
  State state;
  std::uint8_t chunk;
};

// Its bytes tell states apart: none of them is padding.
struct State {
  DeskPartner partners[kMost][kMost];
  DeskUnit hands[kMost][2];
  Frame frames[kMost][kMost][kDirections][kMostFrames];  // [sender][receiver]
  std::uint8_t read[kMost][kMost][kDirections];          // likewise, a bit for each chunk
  std::uint8_t flagged[kMost][kMost];  // [source][relay]: chunks whose flags near ranks can see
  // [source][relay]: by the frame, the chunk to the relay whose words are in it, and 1
  std::uint8_t words[kMost][kMost][kMostFrames];
  std::uint8_t late[kMost], zeros[3];  // a mutant's relay has flags to raise
};
static_assert(std::has_unique_object_representations_v<State>);

// How a relay raises flags: before a frame goes back, up to where the words in the frame of the
// last chunk say, if there is one more; and two mistakes.
enum class Flags : std::uint8_t { right, late, also_without_news };

// Goes through all states that can be reached from the beginning of an operation.
template <class D>
class Search {
 public:
  explicit Search(const Problem& problem, Flags flags = Flags::right)
      : problem_(problem), flags_(flags) {
    for (int r = 0; r < problem.ranks; ++r)
      desks_.emplace_back(now_.partners[r], problem.ranks, problem.frames, problem.requests);
    for (int r = 0; r < problem.ranks; ++r) {
      for (int p = 0; p < problem.ranks; ++p) {
        const std::uint32_t come = problem.chunks[p][r];
        desks_[at(r)].send(p, problem.chunks[r][p]);
        desks_[at(r)].expect(p, problem.unknown && come > 0 ? kUnknownChunks : come);
        for (int f = 0; f < problem.frames; ++f) {
          for (const Direction d : kBoth) {
            const bool held =
                problem.announced && p != r && d == Direction::to_relay && f >= problem.frames - 2;
            if (held) {
              frame(r, p, d, at(f)).state = Frame::credited;
            } else {
              desks_[at(r)].freed(p, d, f);
            }
          }
        }
      }
    }
  }

  // Empty = every order ends well; else a mistake.
  std::string run() {
    add();
    while (mistake_.empty() && !open_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      bool moves = false;
      for_each_step(state, [&](auto&& step) {
        now_ = state;
        step();
        add();
        moves = true;
      });
      now_ = state;
      if (!moves) expect(all_is_done(), "nobody can go on");
    }
    return mistake_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  static constexpr std::array kBoth = {Direction::to_relay, Direction::to_source};

  void expect(bool good, const char* mistake) {
    if (!good && mistake_.empty()) mistake_ = mistake;
  }
  void add() {
    if (!mistake_.empty()) return;
    for (int r = 0; r < problem_.ranks; ++r) expect_may_go(r);
    const Key key{hash_bytes(1, &now_, sizeof(now_)), hash_bytes(2, &now_, sizeof(now_))};
    if (seen_.insert(key).second) open_.push_back(now_);
  }

  // Calls visit(step) for everything that may happen next.
  template <class Visit>
  void for_each_step(const State& state, Visit&& visit) {
    for (int r = 0; r < problem_.ranks; ++r) {
      for (int p = 0; p < problem_.ranks; ++p) {
        for (const Direction d : kBoth) {
          for (int f = 0; f < problem_.frames; ++f) {
            const Frame& frame = state.frames[r][p][static_cast<int>(d)][f];
            if (frame.state == Frame::flying) visit([&] { land(r, p, d, f); });
            if (frame.state == Frame::credited) visit([&] { credit(r, p, d, f); });
          }
        }
      }
      for (int h = 0; h < problem_.hands; ++h) {
        if (state.hands[r][h].work != DeskUnit::nothing) visit([&] { finish(r, h); });
      }
      if (state.late[r] != 0) visit([&] { raise_flags(r); });
      now_ = state;
      const int idle = idle_hand(state, r);
      if (idle >= 0 && desks_[at(r)].next().work != DeskUnit::nothing)
        visit([&] { begin(r, idle); });
    }
  }
  int idle_hand(const State& state, int rank) const {
    for (int h = 0; h < problem_.hands; ++h)
      if (state.hands[rank][h].work == DeskUnit::nothing) return h;
    return -1;
  }

  Frame& frame(int from, int to, Direction direction, std::uint32_t place) {
    return now_.frames[from][to][static_cast<int>(direction)][place];
  }
  std::uint8_t& read(int from, int to, Direction direction) {
    return now_.read[from][to][static_cast<int>(direction)];
  }
  std::uint32_t place_of(std::uint32_t chunk) const { return chunk % at(problem_.frames); }

  void land(int from, int to, Direction direction, int place) {
    frame(from, to, direction, at(place)).state = Frame::landed;
    const std::uint32_t chunks =
        direction == Direction::to_relay ? problem_.chunks[from][to] : problem_.chunks[to][from];
    expect(desks_[at(to)].landed(from, direction, place, chunks), "a good chunk is refused");
    if (direction == Direction::to_relay) {
      now_.words[from][to][place] =
          static_cast<std::uint8_t>(frame(from, to, direction, at(place)).chunk + 1);
    }
  }
  void credit(int from, int to, Direction direction, int place) {
    frame(from, to, direction, at(place)) = {};
    desks_[at(from)].freed(to, direction, place);
  }
  void begin(int rank, int hand) {
    const DeskUnit unit = desks_[at(rank)].next();
    now_.hands[rank][hand] = unit;
    if (unit.fills()) {
      Frame& out = frame(rank, unit.partner, unit.fills_for(), place_of(unit.chunk));
      expect(out.state == Frame::free, "a frame is filled that is under way");
      out = {Frame::filling, static_cast<std::uint8_t>(unit.chunk)};
    }
    if (unit.reads()) {
      const Frame& in = frame(unit.partner, rank, unit.read_from(), place_of(unit.chunk));
      expect(in.state == Frame::landed && in.chunk == unit.chunk,
             "a chunk is read that is not here");
    }
  }
  void finish(int rank, int hand) {
    const DeskUnit unit = now_.hands[rank][hand];
    now_.hands[rank][hand] = {};
    desks_[at(rank)].finished(unit);
    if (unit.fills())
      frame(rank, unit.partner, unit.fills_for(), place_of(unit.chunk)).state = Frame::flying;
    if (!unit.reads()) return;
    std::uint8_t& all = read(unit.partner, rank, unit.read_from());
    expect((all >> unit.chunk & 1) == 0, "a chunk is read twice");
    all = static_cast<std::uint8_t>(all | 1u << unit.chunk);
    if (flags_ == Flags::late) {
      now_.late[rank] = 1;
    } else {
      raise_flags(rank);
    }
    frame(unit.partner, rank, unit.read_from(), place_of(unit.chunk)).state = Frame::credited;
  }
  void raise_flags(int rank) {
    now_.late[rank] = 0;
    for (int p = 0; p < problem_.ranks; ++p) {
      const std::uint32_t behind = desks_[at(rank)].watermark(p);
      const std::uint32_t before = (1u << behind) - 1;
      expect((read(p, rank, Direction::to_relay) & before) == before,
             "a flag is raised before its chunk is read");
      const std::uint32_t told = flags_ == Flags::also_without_news ? 0 : now_.flagged[p][rank];
      if (behind > told && flags_ != Flags::late) {
        expect(now_.words[p][rank][place_of(behind - 1)] == behind,
               "flags are raised by the words of a later chunk");
      }
      now_.flagged[p][rank] = static_cast<std::uint8_t>(behind);
    }
  }

  // A rank whose desk is done and whose frames are free is at rest, and needs to do nothing more.
  bool is_at_rest(int rank) const {
    if (!desks_[at(rank)].is_done()) return false;
    for (int p = 0; p < problem_.ranks; ++p)
      for (const auto& direction : now_.frames[rank][p])
        for (const Frame& frame : direction)
          if (frame.state != Frame::free) return false;
    return true;
  }
  void expect_may_go(int rank) {
    if (!is_at_rest(rank)) return;
    for (int p = 0; p < problem_.ranks; ++p) {
      const std::uint8_t mine = problem_.chunks[rank][p], theirs = problem_.chunks[p][rank];
      expect(now_.flagged[rank][p] == mine, "a source may go whose flags are not raised");
      expect(read(p, rank, Direction::to_relay) == (1u << theirs) - 1,
             "a relay may go that has not read everything");
      if (problem_.requests)
        expect(read(p, rank, Direction::to_source) == (1u << mine) - 1, "an answer is missing");
      for (const auto& direction : now_.frames[p][rank])
        for (const Frame& frame : direction)
          expect(frame.state == Frame::free || frame.state == Frame::credited,
                 "a rank may go while a chunk is under way to it");
    }
  }
  bool all_is_done() const {
    for (int r = 0; r < problem_.ranks; ++r)
      if (!is_at_rest(r)) return false;
    return true;
  }

  struct Key {
    std::uint64_t a, b;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const { return key.a; }
  };

  const Problem problem_;
  const Flags flags_;
  State now_{};
  std::vector<D> desks_;  // their partners are those of now_
  std::unordered_set<Key, Hash> seen_;
  std::vector<State> open_;
  std::string mistake_;
};

constexpr Problem kProblems[] = {
    {.ranks = 2, .frames = 1, .hands = 1, .requests = false, .chunks = {{0, 3}, {3, 0}}},
    {.ranks = 2, .frames = 2, .hands = 2, .requests = false, .chunks = {{0, 3}, {2, 0}}},
    {.ranks = 2, .frames = 1, .hands = 1, .requests = true, .chunks = {{0, 3}, {3, 0}}},
    {.ranks = 2, .frames = 1, .hands = 2, .requests = true, .chunks = {{0, 3}, {2, 0}}},
    {.ranks = 2, .frames = 2, .hands = 1, .requests = true, .chunks = {{0, 3}, {3, 0}}},
    {.ranks = 2, .frames = 2, .hands = 2, .requests = true, .chunks = {{0, 3}, {1, 0}}},
    {.ranks = 2, .frames = 2, .hands = 2, .requests = true, .chunks = {{0, 3}, {0, 0}}},
    {.ranks = 3,
     .frames = 1,
     .hands = 1,
     .requests = false,
     .chunks = {{0, 1, 1}, {1, 0, 1}, {1, 1, 0}}},
    {.ranks = 3,
     .frames = 1,
     .hands = 1,
     .requests = true,
     .chunks = {{0, 2, 0}, {0, 0, 2}, {1, 0, 0}}},
    {.ranks = 3,
     .frames = 2,
     .hands = 1,
     .requests = true,
     .chunks = {{0, 2, 1}, {0, 0, 1}, {0, 0, 0}}},
    {.ranks = 2,
     .frames = 3,
     .hands = 1,
     .requests = false,
     .chunks = {{0, 5}, {2, 0}},
     .announced = true},
    {.ranks = 2,
     .frames = 3,
     .hands = 1,
     .requests = true,
     .chunks = {{0, 4}, {1, 0}},
     .announced = true},
    {.ranks = 2,
     .frames = 2,
     .hands = 1,
     .requests = true,
     .chunks = {{0, 3}, {2, 0}},
     .announced = true},
};

TEST(Desk, ComesToItsEndInAnyOrder) {
  std::size_t all = 0;
  for (Problem problem : kProblems) {
    for (const bool unknown : {false, true}) {
      problem.unknown = unknown;
      Search<Desk> search(problem);
      EXPECT_EQ(search.run(), "") << &problem - kProblems;
      std::cout << problem.ranks << " machines, " << problem.frames << " frames, " << problem.hands
                << " hands, " << (problem.requests ? "requests: " : "rows: ") << search.states()
                << " states\n";
      all += search.states();
    }
  }
  std::cout << all << " states in all\n";
}

// The search's verdict about another desk.
template <class Mutant>
std::string verdict_about(Flags flags = Flags::right) {
  for (const Problem& problem : kProblems) {
    std::string mistake = Search<Mutant>(problem, flags).run();
    if (!mistake.empty()) return mistake;
  }
  return {};
}

// NOLINTBEGIN(bugprone-derived-method-shadowing-base-method): mutants do it another way
struct AnswersWithoutAFrame : Desk {
  using Desk::Desk;
  DeskUnit next() const {
    for (int p = 0; p < kMost; ++p) {
      const int frame = awaited_frame(p, Direction::to_source);
      if (frame >= 0) freed(p, Direction::to_source, frame);
    }
    return Desk::next();
  }
};
struct CountsChunksInHand : Desk {
  CountsChunksInHand(DeskPartner* partners, int count, int frames, bool answered)
      : Desk(partners, count, frames, answered), partners_(partners) {}
  std::uint32_t watermark(int source) const { return partners_[source].in[0].begun; }
  const DeskPartner* partners_;
};
struct AsksBeforeItAnswers : Desk {
  AsksBeforeItAnswers(DeskPartner* partners, int count, int frames, bool answered)
      : Desk(partners, count, frames, answered), partners_(partners), count_(count) {}
  DeskUnit next() const {
    for (int p = 0; p < count_; ++p)
      if (partners_[p].out[0].begun < partners_[p].out[0].total) return next_fill();
    return Desk::next();
  }
  DeskUnit next_fill() const {
    std::vector<DeskPartner> before(partners_, partners_ + count_);
    const DeskUnit unit = Desk::next();
    if (unit.work != DeskUnit::answer) return unit;
    std::ranges::copy(before, partners_);
    return {};
  }
  DeskPartner* partners_;
  int count_;
};

// Numbers what has landed in a way that is right for powers of two.
struct CountsFramesByWrapping : Desk {
  CountsFramesByWrapping(DeskPartner* partners, int count, int frames, bool answered)
      : Desk(partners, count, frames, answered),
        partners_(partners),
        frames_(static_cast<std::uint32_t>(frames)) {}
  bool landed(int partner, Direction direction, int frame, std::uint32_t chunks) const {
    const std::uint32_t done = partners_[partner].in[static_cast<int>(direction)].done;
    const auto place = static_cast<std::uint32_t>(frame);
    const std::uint32_t chunk = done + (place - done) % frames_;
    return Desk::landed(partner, direction, frame_of(chunk), chunks);
  }
  const DeskPartner* partners_;
  std::uint32_t frames_;
};
// NOLINTEND(bugprone-derived-method-shadowing-base-method)

TEST(Desk, WouldBeFoundWithMistakes) {
  EXPECT_EQ(verdict_about<CountsFramesByWrapping>(), "a good chunk is refused");
  EXPECT_EQ(verdict_about<AnswersWithoutAFrame>(), "a frame is filled that is under way");
  EXPECT_EQ(verdict_about<Desk>(Flags::late), "a source may go whose flags are not raised");
  EXPECT_EQ(verdict_about<Desk>(Flags::also_without_news),
            "flags are raised by the words of a later chunk");
  EXPECT_EQ(verdict_about<CountsChunksInHand>(), "a flag is raised before its chunk is read");
  EXPECT_EQ(verdict_about<AsksBeforeItAnswers>(), "nobody can go on");
}

// Chunks that were damaged on their way, or sent by nobody.
TEST(Desk, RefusesChunksThatCannotBe) {
  DeskPartner partner;
  const Desk desk(&partner, 1, 4, false);
  desk.expect(0, 2);
  EXPECT_FALSE(desk.landed(0, Direction::to_relay, 0, 3)) << "as many are not announced";
  EXPECT_FALSE(desk.landed(0, Direction::to_relay, 2, 2)) << "behind the last one";
  EXPECT_FALSE(desk.landed(0, Direction::to_source, 0, 0)) << "an answer to nobody";
  EXPECT_TRUE(desk.landed(0, Direction::to_relay, 1, 2));
  EXPECT_FALSE(desk.landed(0, Direction::to_relay, 1, 2)) << "twice";
  EXPECT_EQ(desk.next().work, DeskUnit::nothing) << "its turn is behind the first one's";
  EXPECT_TRUE(desk.landed(0, Direction::to_relay, 0, 2));
  const DeskUnit first = desk.next(), second = desk.next();
  EXPECT_FALSE(desk.landed(0, Direction::to_relay, 0, 2)) << "into a frame that is being read";
  desk.finished(second);
  EXPECT_EQ(desk.watermark(0), 0U);
  desk.finished(first);
  EXPECT_EQ(desk.watermark(0), 2U);
  EXPECT_TRUE(desk.is_done());
}

}  // namespace
}  // namespace xd::ep
