// Runs a sequence's operations on the caller's thread, one at a time, each as one turn.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>

#include "turn/disagreement.h"
#include "turn/host/calls.h"
#include "turn/host/turn.h"

namespace xd::turn {

// An operation is made from its arguments (and throws if they are bad), then these are called in
// this order, with the turn's verbs between them:
template <class Op, class Family>
concept HostOperation = requires(Op op, const Op& c) {
  // The record that this rank tells its peers.
  { c.record() } -> std::same_as<typename Family::Record>;
  // Before enter(): fills the memory that peers will read.
  op.stage_in();
  // After enter(): sends the words that peers wait for inside the operation.
  op.announce();
  // After await(), where all ranks agree: a reason, equal on all ranks, to move nothing
  // nevertheless.
  { c.obstacle() } -> std::same_as<OperationError<Family>>;
  // Reads and writes the peers' memory.
  op.move();
  // After end(): completes this rank's outputs, reports.
  { op.complete() } -> std::same_as<OperationError<Family>>;
};

template <class Family>
class HostRunner {
 public:
  using Turn = HostTurn<typename Family::Record>;

  // `fatal_errors`: an operation error finishes the communicator.
  HostRunner(Sequence<Family>& sequence, Turn& turn, bool fatal_errors)
      : sequence_(sequence), turn_(turn), calls_(sequence, fatal_errors) {}

  // Returns when the operation that `make` makes has finished here, or throws its operation error.
  // A rank whose `make` throws goes through the same steps with only its failure, so that its peers
  // learn of it at once and the epochs stay together. Fatal errors leave from any step.
  template <class Make>
  void run(std::int32_t operation, Make&& make);

  // Takes a turn with only this error.
  void run_failed(std::int32_t operation, Error&& error) {
    run(operation, [&]() -> Nothing { throw std::move(error); });
  }

  // An operation whose halves are two calls, with no other operation between them. start() enters
  // and waits for nobody; it throws this rank's own operation error, with `op` left empty. finish()
  // must follow in either case: it goes through the rest of the turn and returns what became of it.
  // For sequences that outlive no losses, as neither of the two looks for one.
  template <class Op, class Make>
  void start(std::int32_t operation, std::optional<Op>& op, Make&& make);
  template <HostOperation<Family> Op>
  OperationError<Family> finish(std::int32_t operation, std::optional<Op>& op);
  // Throws the operation error of the operation that has just ended, if it has one, or keeps it for
  // the sequence's status.
  void settle(const OperationError<Family>& operation_error, std::int32_t operation) {
    calls_.settle(operation_error, operation, turn_.epoch());
  }
  // Goes on with the members of the view that take part (HostTurn::enter_view); `find` returns that
  // view, or throws an operation error. `entered()` follows when all are in step; in the view that
  // has been entered last nothing does. Throws PEER_LOST where one has been lost meanwhile.
  template <class Find, class Entered>
  void enter_view(std::int32_t operation, Find&& find, Entered&& entered);
  void keep(const OperationError<Family>& operation_error, std::int32_t operation) {
    calls_.keep(operation_error, operation, turn_.epoch());
  }

  const volatile std::uint64_t* watch() const { return calls_.watch(); }

 private:
  // Stands for an operation that is never made.
  struct Nothing {
    typename Family::Record record() const { return {}; }
    void stage_in() {}
    void announce() {}
    OperationError<Family> obstacle() const { return {}; }
    void move() {}
    OperationError<Family> complete() { return {}; }
  };

  template <HostOperation<Family> Op, class Make>
  OperationError<Family> enter(std::int32_t operation, std::optional<Op>& op, Make&& make);
  template <HostOperation<Family> Op>
  OperationError<Family> leave(std::int32_t operation, std::optional<Op>& op,
                               OperationError<Family> operation_error);
  template <HostOperation<Family> Op>
  OperationError<Family> move(std::int32_t operation, Op& op);
  template <HostOperation<Family> Op>
  OperationError<Family> complete(Op& op);
  OperationError<Family> loss() const;
  // Throws PEER_LOST where the sequence is broken by a loss.
  void require_whole(std::int32_t operation) {
    if (turn_.is_broken()) settle(loss(), operation);
  }

  Sequence<Family>& sequence_;
  Turn& turn_;
  HostCalls<Family> calls_;
  std::optional<std::uint64_t> entered_;  // the number of the view, once there is one
};

template <class Family>
template <class Make>
void HostRunner<Family>::run(std::int32_t operation, Make&& make) {
  const typename HostCalls<Family>::Claim claim(calls_, operation);
  require_whole(operation);
  std::optional<decltype(make())> op;
  OperationError<Family> operation_error = enter(operation, op, std::forward<Make>(make));
  operation_error = leave(operation, op, std::move(operation_error));
  calls_.settle(operation_error, operation, turn_.epoch());
}

template <class Family>
template <class Op, class Make>
void HostRunner<Family>::start(std::int32_t operation, std::optional<Op>& op, Make&& make) {
  const typename HostCalls<Family>::Claim claim(calls_, operation);
  op.reset();
  const OperationError<Family> operation_error = enter(operation, op, std::forward<Make>(make));
  calls_.settle(operation_error, operation, turn_.epoch());
}

template <class Family>
template <HostOperation<Family> Op>
OperationError<Family> HostRunner<Family>::finish(std::int32_t operation, std::optional<Op>& op) {
  const typename HostCalls<Family>::Claim claim(calls_, operation);
  if (op) return leave(operation, op, {});
  turn_.await();  // start() has thrown this rank's operation error already
  turn_.leave();
  turn_.end();
  return {};
}

// Up to the point from which the operation waits for peers.
template <class Family>
template <HostOperation<Family> Op, class Make>
OperationError<Family> HostRunner<Family>::enter(std::int32_t operation, std::optional<Op>& op,
                                                 Make&& make) {
  OperationError<Family> operation_error;
  try {
    op.emplace(std::forward<Make>(make)());
  } catch (...) {
    operation_error = current_operation_error<Family>(sequence_.rank());
    operation_error.met_by_all = true;  // the peers learn of it from this rank's record
  }
  turn_.begin(operation);
  const observe::Span span(sequence_.subject(), "stage");
  if (op) {
    op->stage_in();
    turn_.enter(op->record());
    op->announce();
  } else {
    typename Family::Record failed{};
    failed.call.status = static_cast<std::uint8_t>(operation_error.status);
    turn_.enter(failed);
  }
  return operation_error;
}

template <class Family>
template <HostOperation<Family> Op>
OperationError<Family> HostRunner<Family>::leave(std::int32_t operation, std::optional<Op>& op,
                                                 OperationError<Family> operation_error) {
  {
    const observe::Span span(sequence_.subject(), "wait for entries");
    turn_.await();
  }
  if (!operation_error && !turn_.is_broken()) operation_error = move(operation, *op);
  {
    const observe::Span span(sequence_.subject(), "wait for ends");
    turn_.leave();
    turn_.end();
  }
  // All that are left return it, also a rank with an error of its own: so they know alike.
  if (turn_.is_broken()) return loss();
  if (!operation_error) operation_error = complete(*op);
  return operation_error;
}

template <class Family>
template <class Find, class Entered>
void HostRunner<Family>::enter_view(std::int32_t operation, Find&& find, Entered&& entered) {
  const typename HostCalls<Family>::Claim claim(calls_, operation);
  View view;
  try {
    view = std::forward<Find>(find)();
  } catch (...) {
    return settle(current_operation_error<Family>(sequence_.rank()), operation);
  }
  // All have come to this view already. Where a rank has been lost since, another one is needed.
  if (view.number == entered_) return require_whole(operation);
  if (!turn_.enter_view(operation, view)) return settle(loss(), operation);
  entered_ = view.number;
  std::forward<Entered>(entered)();
}

// The loss by which the sequence is broken.
template <class Family>
OperationError<Family> HostRunner<Family>::loss() const {
  const Errors& errors = sequence_.comm().errors();
  const int rank = turn_.broken_by();
  OperationError<Family> found;
  found.status = XD_ERROR_PEER_LOST;
  found.rank = rank;
  found.text = concat(errors.names().of(rank), errors.left(rank) ? " has left" : " has been lost",
                      ": nothing is moved until the group enters a view without it");
  return found;
}

// A failure here that is not fatal (no memory for an error's text, a peer's record that names no
// memory of its own) is this rank's operation error alone, and the rank still leaves with the
// others.
template <class Family>
template <HostOperation<Family> Op>
OperationError<Family> HostRunner<Family>::move(std::int32_t operation, Op& op) {
  try {
    const auto takes_part = [&](int rank) { return turn_.takes_part(rank); };
    if (auto found = disagreement<Family, typename Family::Record>(turn_.records(),
                                                                   sequence_.rank(), takes_part)) {
      return found;
    }
    if (auto found = op.obstacle()) return found;
    const observe::Span span(sequence_.subject(), "move");
    op.move();
    return {};
  } catch (...) {
    if (sequence_.comm().errors().fatal_error() != nullptr) throw;
    const auto found = current_operation_error<Family>(sequence_.rank());
    if (!turn_.reaches_remote()) return found;
    // Ranks on other machines wait for what this one has not sent, and near ones must not take its
    // done flag for all that it brings them from there.
    calls_.finish_comm(found, operation, turn_.epoch());
    sequence_.comm().errors().throw_if_failed();
    throw;
  }
}

template <class Family>
template <HostOperation<Family> Op>
OperationError<Family> HostRunner<Family>::complete(Op& op) {
  try {
    const observe::Span span(sequence_.subject(), "complete");
    return op.complete();
  } catch (...) {
    return current_operation_error<Family>(sequence_.rank());
  }
}

}  // namespace xd::turn
