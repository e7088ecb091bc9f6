#include "handlers.h"

#include <atomic>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "completions.h"
#include "group.h"
#include "operands.h"
#include "operations.h"
#include "xla_ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace xdjax {
namespace {

enum class Platform { cpu, cuda };

std::atomic<std::uint64_t> made_calls = 0;

// The state that an executable keeps for one of its calls. Each platform has its own registry of
// types, which numbers this type.
template <Platform platform>
struct Call {
  static ffi::TypeId id;
  static constexpr ffi::TypeInfo info = ffi::MakeTypeInfo<Call>();

  std::shared_ptr<Group> group;
  std::vector<std::string> arguments;  // names of the buffers, in XLA's order
  std::vector<std::string> results;
  Numbers numbers;
};
template <Platform platform>
ffi::TypeId Call<platform>::id = {};

ffi::ErrorCode error_code(xd_status status) {
  switch (status) {
    case XD_SUCCESS:
      return ffi::ErrorCode::kOk;
    case XD_ERROR_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case XD_ERROR_MISMATCH:
    case XD_ERROR_BUSY:
      return ffi::ErrorCode::kFailedPrecondition;
    case XD_ERROR_OVERFLOW:
      return ffi::ErrorCode::kOutOfRange;
    case XD_ERROR_TIMEOUT:
      return ffi::ErrorCode::kDeadlineExceeded;
    case XD_ERROR_PEER_LOST:
      return ffi::ErrorCode::kUnavailable;
    case XD_ERROR_ABORTED:
      return ffi::ErrorCode::kAborted;
    case XD_ERROR_OUT_OF_MEMORY:
      return ffi::ErrorCode::kResourceExhausted;
    case XD_ERROR_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case XD_ERROR_SYSTEM:
    case XD_ERROR_INTERNAL:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

ffi::Error error_of(const Problem& problem) {
  return ffi::Error(error_code(problem.status),
                    std::string(xd_status_name(problem.status)) + ": " + problem.text);
}

std::vector<std::string> words(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<std::string> found;
  for (std::string word; stream >> word;) found.push_back(word);
  return found;
}

// ---- Making an executable -----------------------------------------------------------------------

std::shared_ptr<Group> group_for(std::int64_t number, std::string_view config) {
  std::shared_ptr<Group> group = find_group(number);
  if (group == nullptr) {
    throw invalid("group " + std::to_string(number) +
                  " is closed: trace the function again after crossdock.jax.init");
  }
  if (group->text() != config) {
    throw invalid("group " + std::to_string(number) + ": the executable expects " +
                  std::string(config) + ", this process has " + group->text());
  }
  if (const std::optional<Problem> problem = group->create()) throw Problem(*problem);
  return group;
}

template <Platform platform>
ffi::ErrorOr<std::unique_ptr<Call<platform>>> instantiate(
    std::int64_t group, std::string_view config, std::int64_t quantise, std::string_view arguments,
    std::string_view results, std::int64_t alignment, std::int64_t phase, std::int64_t rank,
    std::int64_t masked) {
  try {
    auto call = std::make_unique<Call<platform>>();
    call->arguments = words(arguments);
    call->results = words(results);
    call->numbers = {.alignment = static_cast<std::int32_t>(alignment),
                     .quantise = static_cast<xd_ep_quantise>(quantise),
                     .phase = static_cast<xd_ep_phase>(phase),
                     .mask = {static_cast<std::int32_t>(rank), masked != 0}};
    call->group = group_for(group, config);
    return call;
  } catch (const Problem& problem) {
    return ffi::Unexpected(error_of(problem));
  } catch (const std::exception& failure) {
    return ffi::Unexpected(ffi::Error::Internal(failure.what()));
  }
}

// ---- Running it ---------------------------------------------------------------------------------

std::optional<Problem> add_all(Operands& operands, const std::vector<std::string>& arguments,
                               const std::vector<std::string>& results, ffi::RemainingArgs args,
                               ffi::RemainingRets rets) {
  if (arguments.size() != args.size() || results.size() != rets.size()) {
    return invalid("expected " + std::to_string(arguments.size()) + " arguments and " +
                   std::to_string(results.size()) + " results, got " + std::to_string(args.size()) +
                   " and " + std::to_string(rets.size()));
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (auto problem = operands.add(arguments[i], *args.get<ffi::AnyBuffer>(i))) return problem;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (auto problem = operands.add(results[i], **rets.get<ffi::AnyBuffer>(i))) return problem;
  }
  return std::nullopt;
}

// Throws the Problem of an ordinal that no rank computes on.
template <Platform platform>
Group::Member& member_of(const Call<platform>& call, int ordinal) {
  ++made_calls;
  Group::Member* member = call.group->on_device(ordinal);
  if (member == nullptr) {
    throw invalid("device " + std::to_string(ordinal) +
                  " of this process is not in the mesh of crossdock.jax.init");
  }
  return *member;
}

// Runs the operation, or, with a problem that the peers cannot see, fails it on all ranks. A second
// half, or a call that takes no turn, has no peers that wait for it.
std::optional<Problem> run_or_fail(Operation operation, xd_ep_group* group,
                                   const Operands& operands, const std::optional<Problem>& problem,
                                   xd_stream stream) {
  if (!problem) return problem_of(run(operation, group, operands, stream));
  const std::optional<xd_ep_operation> turn = turn_of(operation);
  if (!turn || operands.numbers().phase == XD_EP_PHASE_RECEIVE) return problem;
  return problem_of(xd_ep_join_failed(group, *turn, problem->text.c_str(), stream));
}

template <Operation operation>
ffi::Error on_cuda(xd_stream stream, int ordinal, Call<Platform::cuda>* call,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  try {
    Group::Member& member = member_of(*call, ordinal);
    Operands operands(member.device, member.rank, call->numbers);
    const auto bad = add_all(operands, call->arguments, call->results, args, rets);
    const auto problem = run_or_fail(operation, member.group, operands, bad, stream);
    return problem ? error_of(*problem) : ffi::Error::Success();
  } catch (const Problem& problem) {
    return error_of(problem);
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// The rank's own thread waits for peers, since XLA has too few threads for it.
template <Operation operation>
ffi::Future on_cpu(int ordinal, Call<Platform::cpu>* call, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  try {
    Group::Member& member = member_of(*call, ordinal);
    auto operands = std::make_shared<Operands>(member.device, member.rank, call->numbers);
    auto bad = add_all(*operands, call->arguments, call->results, args, rets);
    ffi::Promise promise;
    ffi::Future future(promise);
    member.worker->post([group = call->group, &member, operands, bad, promise]() mutable {
      auto problem = run_or_fail(operation, member.group, *operands, bad, nullptr);
      // The task takes the group along, which must not end on its own worker.
      run_soon([group = std::move(group), promise, problem]() mutable {
        if (problem) {
          promise.SetError(error_of(*problem));
        } else {
          promise.SetAvailable();
        }
      });
    });
    return future;
  } catch (const Problem& problem) {
    return failed(error_of(problem));
  } catch (const std::exception& failure) {
    return failed(ffi::Error::Internal(failure.what()));
  }
}

// ---- As XLA takes them --------------------------------------------------------------------------

template <Platform platform>
auto bind_instantiate() {
  return ffi::Ffi::BindInstantiate()
      .Attr<std::int64_t>("group")
      .Attr<std::string_view>("config")
      .Attr<std::int64_t>("quantise")
      .Attr<std::string_view>("arguments")
      .Attr<std::string_view>("results")
      .Attr<std::int64_t>("alignment")
      .Attr<std::int64_t>("phase")
      .Attr<std::int64_t>("rank")
      .Attr<std::int64_t>("masked");
}

template <Platform platform>
XLA_FFI_Error* instantiate_entry(XLA_FFI_CallFrame* frame) {
  static auto* const handler = bind_instantiate<platform>().To(&instantiate<platform>).release();
  return handler->Call(frame);
}

template <Operation operation>
XLA_FFI_Error* cpu_entry(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::State<Call<Platform::cpu>>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(&on_cpu<operation>)
                                   .release();
  return handler->Call(frame);
}

// Masks are set, and ranks brought back into step, once: there is nothing to replay.
std::initializer_list<ffi::Traits> traits_on_cuda(Operation operation) {
  static constexpr std::initializer_list<ffi::Traits> replayed{ffi::Traits::kCmdBufferCompatible};
  static constexpr std::initializer_list<ffi::Traits> once{};
  return turn_of(operation) ? replayed : once;
}

template <Operation operation>
XLA_FFI_Error* cuda_entry(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::PlatformStream<xd_stream>>()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .Ctx<ffi::State<Call<Platform::cuda>>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(&on_cuda<operation>, traits_on_cuda(operation))
                                   .release();
  return handler->Call(frame);
}

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

template <Platform platform, Operation operation>
nb::dict target() {
  nb::dict stages;
  stages["instantiate"] = capsule(&instantiate_entry<platform>);
  if constexpr (platform == Platform::cpu) {
    stages["execute"] = capsule(&cpu_entry<operation>);
  } else {
    stages["execute"] = capsule(&cuda_entry<operation>);
  }
  return stages;
}

template <Platform platform>
nb::dict registration() {
  nb::dict targets;
  targets["crossdock_ep_prepare"] = target<platform, Operation::prepare>();
  targets["crossdock_ep_dispatch"] = target<platform, Operation::dispatch>();
  targets["crossdock_ep_combine"] = target<platform, Operation::combine>();
  targets["crossdock_ep_dispatch_bwd"] = target<platform, Operation::dispatch_bwd>();
  targets["crossdock_ep_combine_bwd"] = target<platform, Operation::combine_bwd>();
  targets["crossdock_ep_ll_dispatch"] = target<platform, Operation::ll_dispatch>();
  targets["crossdock_ep_ll_combine"] = target<platform, Operation::ll_combine>();
  targets["crossdock_ep_ll_mask_get"] = target<platform, Operation::ll_mask_get>();
  targets["crossdock_ep_ll_mask_set"] = target<platform, Operation::ll_mask_set>();
  targets["crossdock_ep_ll_reset"] = target<platform, Operation::ll_reset>();
  nb::dict type;
  type["type_id"] = nb::capsule(&Call<platform>::id);
  type["type_info"] = nb::capsule(&Call<platform>::info);
  nb::dict types;
  types["crossdock_ep_call"] = type;
  nb::dict all;
  all["types"] = types;
  all["targets"] = targets;
  return all;
}

}  // namespace

std::uint64_t calls() { return made_calls; }

nb::dict registrations() {
  nb::dict platforms;
  platforms["cpu"] = registration<Platform::cpu>();
  platforms["CUDA"] = registration<Platform::cuda>();
  return platforms;
}

}  // namespace xdjax
