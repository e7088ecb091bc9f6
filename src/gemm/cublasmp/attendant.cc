#include "gemm/cublasmp/attendant.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/thread.h"
#include "cuda/device.h"
#include "gemm/cublasmp/errand.h"

namespace xd::gemm::cublasmp {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(100);
constexpr auto kLookAgainAtTheEnd = std::chrono::milliseconds(1);

}  // namespace

// The mutex is held for all but the engine's and the marks' own enqueuing.
struct Attendant::Watched {
  struct Product {
    ProductTurn turn;
    std::unique_ptr<Marks> marks;
    bool enqueued = false;
    std::optional<Deadline> deadline{};  // none while the stream has not come to it
  };

  Watched(Comm& owner, std::shared_ptr<Engine> made, MakeMarks make)
      : comm(&owner),
        rank(owner.rank()),
        timeout_ms(owner.timeout_ms()),
        engine(std::move(made)),
        make_marks(std::move(make)) {}

  Product& add(const ProductTurn& turn) {
    const std::lock_guard lock(mutex);
    if (idle.empty()) idle.push_back(make_marks());
    const bool was_empty = under_way.empty();
    under_way.push_back(
        {.turn = turn, .marks = nullptr, .deadline = Deadline::after_ms(timeout_ms)});
    under_way.back().marks = std::move(idle.back());
    idle.pop_back();
    if (was_empty) changed.notify_all();
    return under_way.back();
  }
  // Nothing of the last one has been enqueued.
  void remove_last() {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(under_way.back().marks));
    under_way.pop_back();
  }
  void set_enqueued(Product& product) {
    const std::lock_guard lock(mutex);
    product.deadline.reset();
    product.enqueued = true;
  }

  void forget_ended() {
    while (!under_way.empty() && under_way.front().enqueued && under_way.front().marks->ended()) {
      idle.push_back(std::move(under_way.front().marks));
      under_way.pop_front();
    }
  }
  // Products follow one another, so the first one is waited for, and the last one may be what the
  // host enqueues.
  const Product* late() {
    Product& first = under_way.front();
    if (first.enqueued && !first.deadline && first.marks->begun()) {
      first.deadline = Deadline::after_ms(timeout_ms);
    }
    for (const Product* product : {&first, &under_way.back()}) {
      if (product->deadline && product->deadline->passed()) return product;
    }
    return nullptr;
  }
  // True if what is under way must not be waited for any longer.
  bool must_stop() {
    forget_ended();
    if (under_way.empty()) return false;
    if (comm != nullptr && comm->errors().fatal_error() != nullptr) return true;
    const Product* const product = late();
    if (product == nullptr) return false;
    if (comm != nullptr) {
      comm->errors().raise({.status = XD_ERROR_TIMEOUT,
                            .phase = XD_PHASE_ROWS,
                            .rank = rank,
                            .group = product->turn.group,
                            .operation = product->turn.operation,
                            .timeout_ms = timeout_ms,
                            .expected_epoch = product->turn.epoch},
                           xd::Spread::everywhere);
    }
    return true;
  }

  // False: something is under way at the deadline, and is looked after without the communicator.
  bool end(const Deadline& deadline) {
    std::unique_lock lock(mutex);
    ends = true;
    for (;;) {
      forget_ended();
      changed.notify_all();
      if (under_way.empty() && attended) return true;
      if (deadline.passed()) break;
      changed.wait_for(lock, kLookAgainAtTheEnd);
    }
    comm = nullptr;
    return false;
  }

  std::mutex mutex;
  std::condition_variable changed;
  Comm* comm;  // nullptr = it may be gone
  const int rank, timeout_ms;
  const std::shared_ptr<Engine> engine;
  const MakeMarks make_marks;
  std::list<Product> under_way;
  std::vector<std::unique_ptr<Marks>> idle;
  bool ends = false;
  bool attended = false;  // the thread has done all that it does
};

void Attendant::attend(Watched& w) {
  std::unique_lock lock(w.mutex);
  bool stops = false;
  while (!stops && !(w.ends && w.under_way.empty())) {
    if (w.under_way.empty()) {
      w.changed.wait(lock);
      continue;
    }
    try {
      stops = w.must_stop();
    } catch (...) {  // no memory to find out
      stops = true;
    }
    if (!stops) w.changed.wait_for(lock, kLookAgain);
  }
  if (stops) {
    lock.unlock();
    w.engine->stop();
    lock.lock();
  }
  w.attended = true;
  w.changed.notify_all();
}

Attendant::Attendant(Comm& comm, std::shared_ptr<Engine> engine, MakeMarks make_marks)
    : comm_(comm),
      watched_(std::make_shared<Watched>(comm, std::move(engine), std::move(make_marks))),
      thread_(start_thread("xd-cublasmp", [watched = watched_] { attend(*watched); })) {}

Engine& Attendant::engine() const { return *watched_->engine; }

Deadline Attendant::patience() const {
  return Deadline::after_ms(std::min(kPatienceMs, comm_.timeout_ms()));
}

void Attendant::enqueue(const ProductTurn& turn, const Description& description,
                        const Operands& operands, cudaStream_t stream) {
  Watched& w = *watched_;
  Watched::Product& product = w.add(turn);
  try {
    product.marks->begin(stream);
  } catch (...) {
    w.remove_last();
    throw;
  }
  // A product that has failed may have been enqueued in part. One whose end is unknown never ends.
  const auto mark_end = [&] {
    product.marks->end(stream);
    w.set_enqueued(product);
  };
  try {
    w.engine->enqueue(description, operands, stream);
  } catch (...) {
    try {
      mark_end();
    } catch (const Error&) {  // the first error is the cause
    }
    throw;
  }
  mark_end();
}

// False: it has not ended in time, and may still be under way.
bool Attendant::end_engine() noexcept {
  try {
    const bool alone = comm_.errors().fatal_error() != nullptr || watched_->engine->stopped();
    const auto work = [engine = watched_->engine, alone] {
      alone ? engine->give_up() : engine->release();
    };
    const DLDevice device = comm_.device();
    return Errand::run(
        [work, device] {
          if (device.device_type != kDLCUDA) return work();
          xd::cuda::try_on_device(device.device_id, work);
        },
        patience());
  } catch (...) {  // no memory for a thread
    return false;
  }
}

Attendant::~Attendant() {
  if (!xd::cuda::usable_in_this_process()) {  // a fork, which has no such thread
    thread_.detach();
    keep_for_good(watched_);
    return;
  }
  const char* why_kept = nullptr;
  if (!watched_->end(patience())) {
    thread_.detach();
    why_kept = "a product by cuBLASMp is under way";
  } else {
    thread_.join();
    if (!end_engine()) why_kept = "cuBLASMp waits for ranks that have not destroyed their contexts";
  }
  if (why_kept == nullptr) return;
  log_warning(why_kept, " [rank ", comm_.rank(), " of ", comm_.num_ranks(),
              "]: what it uses is kept until the process ends");
  keep_for_good(watched_);
}

}  // namespace xd::gemm::cublasmp
