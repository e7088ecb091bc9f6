// The streams of a pass by parts on CUDA devices: one for operations, whose small kernels go before
// blocks of products that have not begun, and two for products, so that those of one part fill the
// multiprocessors that the end of another's leaves.
//
// All of them wait for the caller's stream when a pass begins, and that stream waits for them when
// the pass ends, so that a capture of the caller's stream has them all.

#include "moe/streams.h"

#include <array>
#include <exception>

#include "base/deadline.h"
#include "base/error.h"
#include "cuda/device.h"
#include "cuda/known_memory.h"
#include "cuda/side_stream.h"
#include "ep/plan/cuda/launch_shape.h"
#include "moe/executors.h"

namespace xd::moe::cuda {
namespace {

using xd::cuda::DeviceGuard;
using xd::cuda::Priority;
using xd::cuda::SideStream;

class CudaStreams final : public Streams {
 public:
  explicit CudaStreams(int device) : device_(device) {
    const DeviceGuard guard(device);
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      sides_[i] =
          std::make_unique<SideStream>(device, i == 0 ? Priority::highest : Priority::usual);
    }
    sides_[0]->reserve(kEvents);
  }
  // A stream on which something still runs does not go back to the pool.
  ~CudaStreams() override {
    constexpr int kPatienceMs = 2000;
    xd::cuda::try_on_device(device_, [this] {
      const auto deadline = Deadline::after_ms(kPatienceMs);
      for (std::unique_ptr<SideStream>& side : sides_) {
        if (side->comes_to_rest(deadline)) continue;
        [[maybe_unused]] const SideStream* const kept = side.release();
      }
    });
  }
  CudaStreams(const CudaStreams&) = delete;
  CudaStreams& operator=(const CudaStreams&) = delete;

  // An exception leaves everything on the caller's stream.
  void begin(xd_stream caller) override {
    Streams::begin(caller);
    const DeviceGuard guard(device_);
    joined_ = 0;
    // Streams of the library would leave a green context's multiprocessors.
    if (xd::cuda::is_of_green_context(caller)) return;
    // It is checked before an event is recorded, which would take that capture down.
    XD_REQUIRE(!xd::cuda::is_legacy_stream(caller) || xd::cuda::takes_work(caller),
               "stream: is the legacy default stream, as NULL is, expected another one while a "
               "blocking stream is captured");
    sides_[0]->begin();
    for (const std::unique_ptr<SideStream>& side : sides_) side->leave_other_captures(caller);
    try {
      const cudaEvent_t begun = sides_[0]->record(caller);
      for (const std::unique_ptr<SideStream>& side : sides_) {
        SideStream::wait(begun, side->get());
        ++joined_;
      }
    } catch (...) {
      static_cast<void>(rejoin());
      throw;
    }
  }
  void end() override {
    const DeviceGuard guard(device_);
    if (const std::exception_ptr error = rejoin()) std::rethrow_exception(error);
  }

  xd_stream transfers() const override { return beside() ? sides_[0]->get() : caller_; }
  xd_stream products(int part) const override {
    return beside() ? sides_[part % 2 == 1 ? 1 : 2]->get() : caller_;
  }
  Mark mark(xd_stream stream) override {
    if (!beside()) return nullptr;
    const DeviceGuard guard(device_);
    return sides_[0]->record(stream);
  }
  void wait(Mark mark, xd_stream stream) override {
    if (mark != nullptr) SideStream::wait(static_cast<cudaEvent_t>(mark), stream);
  }

 private:
  // A pass is under way on streams of the library.
  bool beside() const { return joined_ == sides_.size(); }
  // Lets the caller's stream wait for those that wait for it, all of them also behind an error,
  // since a capture cannot end without them. Returns the first error.
  std::exception_ptr rejoin() noexcept {
    std::exception_ptr first;
    for (; joined_ > 0; --joined_) {
      try {
        sides_[0]->order(sides_[joined_ - 1]->get(), caller_);
      } catch (...) {
        if (first == nullptr) first = std::current_exception();
      }
    }
    return first;
  }

  static constexpr std::size_t kEvents = 48;  // of 16 parts

  const int device_;
  std::size_t joined_ = 0;  // the first of `sides_`, which wait for the caller's stream
  std::array<std::unique_ptr<SideStream>, 3> sides_;  // of operations, then of products
};

}  // namespace

std::unique_ptr<Streams> make_streams(int device) { return std::make_unique<CudaStreams>(device); }

int most_sms(const ep::Group& group) {
  const Comm& comm = group.comm();
  return ep::cuda::sm_budget(
      group.config(), {.sms = comm.multiprocessors(), .ranks_on_device = comm.ranks_on_device()});
}

void require_memory(int device, std::initializer_list<Tensor> tensors) {
  const DeviceGuard guard(device);
  for (const Tensor& tensor : tensors) {
    xd::cuda::KnownMemory::of(device).require({xd::cuda::claim(tensor)});
  }
}

}  // namespace xd::moe::cuda
