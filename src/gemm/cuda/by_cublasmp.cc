// A context's products by cuBLASMp: what it can do, and how the ranks come to them together.
#include <utility>

#include "base/error.h"
#include "cuda/device.h"
#include "gemm/cuda/call_shape.h"
#include "gemm/cuda/cuda_context.h"

namespace xd::gemm::cuda {
namespace {

bool has_rows(const ProductCall& call) {
  return (call.operation == XD_GEMM_ALL_REDUCE ? call.a_rows : call.shares.all()) > 0;
}

Record record_for_cublasmp(const ProductCall& call) {
  Record record = record_of(call, call.algo);
  if (is_plain_for_cublasmp(call)) record.given |= kIsFinished;
  return record;
}

// `d`: nullptr = none yet.
std::pair<cublasmp::Description, cublasmp::Operands> told_to_cublasmp(const ProductCall& call,
                                                                      const Config& config,
                                                                      void* d) {
  const bool plain = is_plain_for_cublasmp(call);
  return {cublasmp::describe(call, config, plain ? call.d.type : DType::f32, plain),
          cublasmp::operands_of(call, d, plain)};
}

}  // namespace

bool CudaContext::start_by_cublasmp(const ProductCall& call, const Option& option, xd_stream stream,
                                    bool& entered) {
  const EnqueuedTurn turn = next_turn(record_for_cublasmp(call), entered);
  try {
    const bool taken = meet_and_enqueue(call, option, turn, stream, entered);
    if (!taken) entered = false;  // the turns so far have ended as they should
    return taken;
  } catch (...) {
    // Launches that have been enqueued end at the mark. Where the communicator is finished, that is
    // why.
    met_ = false;
    xd::cuda::try_on_device(comm().device().device_id, [&] { end(stream); });
    comm().errors().throw_if_failed();
    throw;
  }
}

// NCCL waits for ranks without a bound. So the host waits here, within bounds, until it knows that
// all ranks have come with the same call, before it enqueues what waits for them. The meeting need
// not wait for products of meetings before it, so calls in a row are enqueued ahead of the device.
bool CudaContext::meet_and_enqueue(const ProductCall& call, const Option& option,
                                   const EnqueuedTurn& turn, xd_stream stream, bool& entered) {
  SideStream& side = *memory_->side;
  side.begin();
  const bool follows_a_meeting =
      met_ && !captured_ && last_ == stream && stream != cudaStreamPerThread;
  if (!follows_a_meeting) {
    begin(turn.params(), stream);
    side.order(stream, side.get());
  }
  met_ = false;
  bool refused = false;
  if (const auto epoch = memory_->meeting->hold(turn, side, comm())) {
    const auto taken_by = enqueue_by_cublasmp(call, option, turn, *epoch, stream, entered);
    refused = taken_by == cublasmp::TakenBy::none;
    met_ = taken_by == cublasmp::TakenBy::all && !call.reduce_bias_grad;
  }
  side.order(side.get(), stream);
  end(stream);
  return !refused;
}

// Where some ranks alone have enqueued the product, it would wait for good and is ended: all ranks
// have heard of that by their second meeting.
cublasmp::TakenBy CudaContext::enqueue_by_cublasmp(const ProductCall& call, const Option& option,
                                                   const EnqueuedTurn& turn, std::uint64_t epoch,
                                                   xd_stream stream, bool& entered) {
  using cublasmp::TakenBy;
  const Operation work(shop_, call, option, turn, stream);
  const auto told = told_to_cublasmp(call, config(), work.begin_by_cublasmp());
  TakenBy taken_by = TakenBy::all;
  if (has_rows(call)) {
    taken_by = kinds_.enqueue(
        turn.params().record,
        [&] {
          cublasmp_->enqueue({.group = number(), .operation = call.operation, .epoch = epoch},
                             told.first, told.second, stream);
        },
        [&](const Record& record) {
          const EnqueuedTurn second = next_turn(record, entered);
          return memory_->meeting->hold(second, *memory_->side, comm()).has_value();
        });
  }
  if (taken_by == TakenBy::some) cublasmp_->get()->stop();
  if (taken_by == TakenBy::all) work.end_by_cublasmp();
  return taken_by;
}

std::string CudaContext::cublasmp_obstacle(const ProductCall& call) const {
  if (!cublasmp_) return "needs a context that was made for it, by config.algo or config.nccl_comm";
  cublasmp::Engine* const engine = cublasmp_->get();
  if (engine == nullptr) return cublasmp_->why_not();
  std::string found = cublasmp::obstacle(call, config(), engine->abilities());
  if (!found.empty() || !has_rows(call)) return found;
  if (found = kinds_.obstacle(record_for_cublasmp(call)); !found.empty()) return found;
  try {
    const xd::cuda::DeviceGuard guard(comm().device().device_id);
    const auto [description, operands] = told_to_cublasmp(call, config(), nullptr);
    engine->require(description, operands);
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    return error.what();
  }
  return "";
}

}  // namespace xd::gemm::cuda
