#include "net/engines/wrong_links.h"

#include <map>
#include <set>
#include <utility>

#include "net/engines/layer.h"
#include "net/link_tag.h"

namespace xd::net {
namespace {

class WrongLinks final : public EngineLayer {
 public:
  WrongLinks(std::unique_ptr<Engine> below, Mutant mutant, int frames)
      : EngineLayer(std::move(below)), mutant_(mutant), frames_(static_cast<unsigned>(frames)) {}

  bool put(const Put& put) override {
    LinkTag tag = LinkTag::of(put.tag);
    if (tag.kind != TagKind::chunk) return below().put(put);
    const ChunkId chunk = ChunkId::of(put.id);
    if (mutant_ == Mutant::stale_generation && chunk.generation == 2) tag.generation = 1;
    Put changed = put;
    changed.tag = tag.word();
    if (!below().put(changed)) return false;
    last_[{chunk.neighbour, chunk.frame}] = put.id;
    under_way_.insert(put.id);
    return true;
  }

  void poll(Events& events) override {
    Events heard;
    below().poll(heard);
    for (const std::uint32_t tag : heard.arrived) on_arrival(LinkTag::of(tag), events);
    for (const std::uint64_t id : heard.sent) on_sent(id, events);
    for (PeerFailure& failure : heard.failed) events.failed.push_back(std::move(failure));
  }

 private:
  void on_arrival(LinkTag tag, Events& events) {
    if (tag.kind == TagKind::credit) {
      if (mutant_ == Mutant::refill_without_credit) return;
      const std::uint64_t id = last_[{tag.channel, tag.frame}];
      if (mutant_ == Mutant::refill_before_sent && under_way_.erase(id) > 0)
        events.sent.push_back(id);
    } else if (tag.kind == TagKind::chunk && mutant_ == Mutant::count_for_frame) {
      const unsigned number = chunks_[tag.channel]++;
      tag.frame = number % frames_;
      tag.generation = number / frames_ + 1;
    }
    events.arrived.push_back(tag.word());
  }

  void on_sent(std::uint64_t id, Events& events) {
    if (id != kEmptyId && under_way_.erase(id) == 0) return;  // the links have been told
    events.sent.push_back(id);
    if (id == kEmptyId || mutant_ != Mutant::refill_without_credit) return;
    const ChunkId chunk = ChunkId::of(id);
    events.arrived.push_back(LinkTag{.kind = TagKind::credit,
                                     .frame = chunk.frame,
                                     .generation = chunk.generation,
                                     .channel = chunk.neighbour}
                                 .word());
  }

  const Mutant mutant_;
  const unsigned frames_;
  std::map<std::pair<unsigned, unsigned>, std::uint64_t> last_;  // put of a neighbour's frame
  std::set<std::uint64_t> under_way_;    // chunks; the links wait for `sent`
  std::map<unsigned, unsigned> chunks_;  // arrived so far, by neighbour
};

}  // namespace

std::unique_ptr<Engine> make_wrong_links(std::unique_ptr<Engine> below, Mutant mutant, int frames) {
  return std::make_unique<WrongLinks>(std::move(below), mutant, frames);
}

}  // namespace xd::net
