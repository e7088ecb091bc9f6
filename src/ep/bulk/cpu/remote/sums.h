// Sums of a token's rows on other machines, and gradients of its weights there. A source asks its
// relays for one sum for each of a token's hosts there; a relay adds up the rows, which its
// machine's ranks hold, and answers.
#pragma once

#include <cstdint>
#include <vector>

#include "ep/bulk/cpu/operation.h"
#include "ep/bulk/cpu/remote/relay.h"
#include "ep/bulk/cpu/token_terms.h"

namespace xd::ep::cpu {

// The gradient of the weight of a token's choice k, in near ranks' memory; 0 = it has no row there.
float weight_gradient(const Context& context, const std::uint32_t* codes, int topk, int k);

class RemoteSums final : public RemoteHands {
 public:
  struct Wish {
    Tensor sums;       // shape and type of the sums; none = no sums
    bool weighted;     // rows are multiplied by their weights
    Tensor gradients;  // of the weights, by token and choice: answers are written here
    WireFormat wire;   // of the sums

    TokenTerms::Shape shape() const { return {sums, weighted, wire}; }
  };
  RemoteSums(const Context& context, const PlanView& plan, const Wish& wish);
  ~RemoteSums() { side_.end(); }
  RemoteSums(const RemoteSums&) = delete;
  RemoteSums& operator=(const RemoteSums&) = delete;

  // How many a chunk has at most: their answers are one chunk, too.
  static std::size_t requests_in_chunk(const RemoteSide& side, const PlanView& plan,
                                       const Wish& wish);

  // Asks what the side's items have, and answers others; returns when all sums are made and all
  // others have their answers. A token is summed when its last answer comes, so that the network
  // goes on meanwhile.
  void run();

  Filled work(const DeskUnit& unit, const RemoteChunk* come, std::byte* room) override;

 private:
  RemotePlaces hosts_of(std::int64_t token) const {
    return remote_places(context_, {plan_.codes(token), at(topk_)}, RemotePlace::host);
  }
  int host_at(const RequestItem& request) const;
  Filled ask(int relay, std::uint32_t chunk, std::byte* room) const;
  Filled answer(const RemoteChunk& requests, std::byte* room) const;
  std::size_t answer_item(const std::byte* request, std::byte* item) const;
  AnswerLayout layout_of(AnswerForm form) const;
  void receive(const RemoteChunk& chunk, std::size_t asked);
  // `last`: the answer that has come last, which is read where it is.
  void receive_item(const RequestItem& request, const std::byte* item);
  void add_up(std::int64_t token, std::uint32_t last_place, const std::byte* last) const;
  void keep_gradients(const RequestItem& request, const float* gradients);
  std::byte* sum_at(std::uint32_t place) const { return sums_.data() + place * longest_.row_bytes; }

  const Context context_;
  const PlanView& plan_;
  const Wish wish_;
  RemoteSide& side_;
  const int topk_;
  const AnswerLayout longest_;
  const rows::Store store_;
  std::span<std::byte> sums_;      // by place: (token, host) in the order of requests
  std::vector<AnswerForm> forms_;  // of sums, likewise
  RemoteAnswers& answers_;
};

}  // namespace xd::ep::cpu
