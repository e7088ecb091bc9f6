// How XLA makes and runs one custom call, the same for all families of operations (sequence.h) on
// the CPU and on CUDA devices.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "completions.h"
#include "operands.h"
#include "problem.h"
#include "sequence.h"
#include "xla_ffi.h"

namespace xdjax {

namespace ffi = xla::ffi;

enum class Platform { cpu, cuda };

// How often XLA has called a handler of an operation in this process.
inline std::atomic<std::uint64_t> made_calls = 0;

// Adds the buffers of a call under their names.
std::optional<Problem> add_all(Operands& operands, const std::vector<std::string>& arguments,
                               const std::vector<std::string>& results, ffi::RemainingArgs args,
                               ffi::RemainingRets rets);

// Buffers that begin with a dimension of a rank's experts, where the ranks have unequal numbers of
// them. XLA's have as many as the rank with the most; the library sees those that a rank has.
struct ByExpert {
  std::vector<std::string> buffers;
  std::vector<std::int64_t> missing;  // by rank, up to the most; empty where all have as many
};

// The state that an executable keeps for one of its calls. Each platform has its own registry of
// types, which numbers this type.
template <Platform platform, class Family>
struct Call {
  static inline ffi::TypeId id = {};
  static constexpr ffi::TypeInfo info = ffi::MakeTypeInfo<Call>();

  std::shared_ptr<Sequence<Family>> sequence;
  std::vector<std::string> arguments;  // names of the buffers, in XLA's order
  std::vector<std::string> results;
  typename Family::Numbers numbers;
  ByExpert by_expert;

  // The buffers of one run, under their names. A problem says where their numbers differ, or which
  // of them the library does not take.
  std::optional<Problem> add_all(Operands& operands, ffi::RemainingArgs args,
                                 ffi::RemainingRets rets) const {
    if (auto problem = xdjax::add_all(operands, arguments, results, args, rets)) return problem;
    if (by_expert.missing.empty()) return std::nullopt;
    for (const std::string& name : by_expert.buffers) {
      operands.shorten(name, by_expert.missing[static_cast<std::size_t>(operands.rank())]);
    }
    return std::nullopt;
  }
};

ffi::Error error_of(const Problem& problem);

// The words of a text that blanks separate.
std::vector<std::string> words(std::string_view text);

// ---- Making an executable -----------------------------------------------------------------------

// The sequence with this number and config, which is made if it has not been. Throws Problem.
template <class Family>
std::shared_ptr<Sequence<Family>> sequence_for(std::int64_t number, std::string_view config) {
  const std::string name = std::string(Family::word) + " " + std::to_string(number);
  std::shared_ptr<Sequence<Family>> sequence = Registry<Family>::get().find(number);
  if (sequence == nullptr) {
    throw invalid(name + " is closed: trace the function again after " + Family::init);
  }
  if (sequence->text() != config) {
    throw invalid(name + ": the executable expects " + std::string(config) + ", this process has " +
                  sequence->text());
  }
  if (const std::optional<Problem> problem = sequence->create()) throw Problem(*problem);
  return sequence;
}

template <Platform platform, class Family>
ffi::ErrorOr<std::unique_ptr<Call<platform, Family>>> make_call(
    std::int64_t number, std::string_view config, std::string_view arguments,
    std::string_view results, const typename Family::Numbers& numbers, ByExpert by_expert = {}) {
  try {
    auto call = std::make_unique<Call<platform, Family>>();
    call->arguments = words(arguments);
    call->results = words(results);
    call->numbers = numbers;
    call->by_expert = std::move(by_expert);
    call->sequence = sequence_for<Family>(number, config);
    return call;
  } catch (const Problem& problem) {
    return ffi::Unexpected(error_of(problem));
  } catch (const std::exception& failure) {
    return ffi::Unexpected(ffi::Error::Internal(failure.what()));
  }
}

// ---- Running it ---------------------------------------------------------------------------------

// Throws the Problem of an ordinal that no rank computes on.
template <Platform platform, class Family>
typename Sequence<Family>::Member& member_of(const Call<platform, Family>& call, int ordinal) {
  ++made_calls;
  typename Sequence<Family>::Member* member = call.sequence->on_device(ordinal);
  if (member == nullptr) {
    throw invalid("device " + std::to_string(ordinal) + " of this process is not in the mesh of " +
                  Family::init);
  }
  return *member;
}

// Runs the operation, or, with a problem that the peers cannot see, fails it on all ranks.
template <class Family>
std::optional<Problem> run_or_fail(typename Family::Operation operation,
                                   const typename Family::Numbers& numbers,
                                   typename Family::Handle* handle, const Operands& operands,
                                   const std::optional<Problem>& problem, xd_stream stream) {
  if (!problem) return problem_of(Family::run(operation, numbers, handle, operands, stream));
  const auto failed = Family::fail(operation, numbers, handle, problem->text.c_str(), stream);
  return failed ? problem_of(*failed) : problem;
}

template <class Family, typename Family::Operation operation>
ffi::Error on_cuda(xd_stream stream, int ordinal, Call<Platform::cuda, Family>* call,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  try {
    auto& member = member_of(*call, ordinal);
    Operands operands(member.device, member.rank);
    const auto bad = call->add_all(operands, args, rets);
    const auto problem =
        run_or_fail<Family>(operation, call->numbers, member.handle, operands, bad, stream);
    return problem ? error_of(*problem) : ffi::Error::Success();
  } catch (const Problem& problem) {
    return error_of(problem);
  } catch (const std::exception& failure) {
    return ffi::Error::Internal(failure.what());
  }
}

inline ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// The rank's own thread waits for peers, since XLA has too few threads for it.
template <class Family, typename Family::Operation operation>
ffi::Future on_cpu(int ordinal, Call<Platform::cpu, Family>* call, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  try {
    auto& member = member_of(*call, ordinal);
    auto operands = std::make_shared<Operands>(member.device, member.rank);
    auto bad = call->add_all(*operands, args, rets);
    ffi::Promise promise;
    ffi::Future future(promise);
    member.worker->post([sequence = call->sequence, numbers = call->numbers, &member, operands, bad,
                         promise]() mutable {
      auto problem =
          run_or_fail<Family>(operation, numbers, member.handle, *operands, bad, nullptr);
      // The task takes the sequence along, which must not end on its own worker.
      run_soon([sequence = std::move(sequence), promise, problem]() mutable {
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

template <class Family, typename Family::Operation operation>
XLA_FFI_Error* cpu_entry(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::BindExecute()
                                   .Ctx<ffi::DeviceOrdinal>()
                                   .template Ctx<ffi::State<Call<Platform::cpu, Family>>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(&on_cpu<Family, operation>)
                                   .release();
  return handler->Call(frame);
}

template <class Family>
std::initializer_list<ffi::Traits> traits_on_cuda(typename Family::Operation operation) {
  static constexpr std::initializer_list<ffi::Traits> replayed{ffi::Traits::kCmdBufferCompatible};
  static constexpr std::initializer_list<ffi::Traits> once{};
  return Family::replayable(operation) ? replayed : once;
}

template <class Family, typename Family::Operation operation>
XLA_FFI_Error* cuda_entry(XLA_FFI_CallFrame* frame) {
  static auto* const handler =
      ffi::Ffi::BindExecute()
          .Ctx<ffi::PlatformStream<xd_stream>>()
          .template Ctx<ffi::DeviceOrdinal>()
          .template Ctx<ffi::State<Call<Platform::cuda, Family>>>()
          .RemainingArgs()
          .RemainingRets()
          .To(&on_cuda<Family, operation>, traits_on_cuda<Family>(operation))
          .release();
  return handler->Call(frame);
}

inline nanobind::capsule capsule(XLA_FFI_Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

// The stages of one custom call, by the names of jax.ffi.
template <Platform platform, class Family, typename Family::Operation operation>
nanobind::dict target(XLA_FFI_Handler* instantiate) {
  nanobind::dict stages;
  stages["instantiate"] = capsule(instantiate);
  if constexpr (platform == Platform::cpu) {
    stages["execute"] = capsule(&cpu_entry<Family, operation>);
  } else {
    stages["execute"] = capsule(&cuda_entry<Family, operation>);
  }
  return stages;
}

template <Platform platform, class Family>
nanobind::dict type() {
  nanobind::dict entry;
  entry["type_id"] = nanobind::capsule(&Call<platform, Family>::id);
  entry["type_info"] = nanobind::capsule(&Call<platform, Family>::info);
  return entry;
}

}  // namespace xdjax
