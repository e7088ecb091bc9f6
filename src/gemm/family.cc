#include "gemm/family.h"

#include <utility>

#include "base/dtype.h"
#include "base/error.h"
#include "gemm/cost_model.h"

namespace xd::gemm {

namespace {

template <class A, class B>
std::string of(const char* what, const A& theirs, const B& mine) {
  return concat(what, " ", theirs, ", here ", mine);
}

std::string of_type(const char* what, std::uint8_t theirs, std::uint8_t mine) {
  return of(what, dtype_name(static_cast<DType>(theirs)), dtype_name(static_cast<DType>(mine)));
}

const char* epilogue_name(std::uint8_t epilogue) {
  constexpr const char* kNames[] = {"NONE", "GELU", "DGELU", "RELU", "DRELU"};
  return epilogue < std::size(kNames) ? kNames[epilogue] : "?";
}

std::string of_operand(const char* what, bool they_give_it) {
  return of(what, they_give_it ? "given" : "NULL", they_give_it ? "NULL" : "given");
}

std::string of_flags(std::uint8_t theirs, std::uint8_t mine) {
  const int differ = theirs ^ mine;
  const auto flag = [&](int bit, const char* what) {
    return of(what, (theirs & bit) != 0 ? 1 : 0, (mine & bit) != 0 ? 1 : 0);
  };
  if ((differ & kBulkReduces) != 0) return "another collective";
  if ((differ & kTransposeA) != 0) return flag(kTransposeA, "transpose_a");
  if ((differ & kTransposeB) != 0) return flag(kTransposeB, "transpose_b");
  if ((differ & kReduceBiasGrad) != 0) return flag(kReduceBiasGrad, "reduce_bias_grad");
  if ((differ & kAllowTf32) != 0) return flag(kAllowTf32, "allow_tf32");
  if ((differ & kWantsAmax) != 0) return of_operand("d_amax", (theirs & kWantsAmax) != 0);
  if ((differ & kWantsBiasGrad) != 0)
    return of_operand("bias_grad", (theirs & kWantsBiasGrad) != 0);
  return of_operand("pre_activation", (theirs & kWantsPreActivation) != 0);
}

std::string of_given(std::uint8_t theirs, std::uint8_t mine) {
  constexpr std::pair<int, const char*> kOperands[] = {{kGivesC, "c"},
                                                       {kGivesBias, "bias"},
                                                       {kGivesPreActivation, "pre_activation"},
                                                       {kGivesBiasGrad, "bias_grad"},
                                                       {kGivesAmax, "d_amax"},
                                                       {kGivesBScale, "b_scale"}};
  for (const auto& [bit, name] : kOperands) {
    if (((theirs ^ mine) & bit) != 0) return of_operand(name, (theirs & bit) != 0);
  }
  const auto flag = [&](int bit, const char* what) {
    return of(what, (theirs & bit) != 0 ? 1 : 0, (mine & bit) != 0 ? 1 : 0);
  };
  if (((theirs ^ mine) & kIsRefused) != 0) return flag(kIsRefused, "refused by cuBLASMp:");
  return flag(kIsFinished, "bias of the type of d that begins at a multiple of 16 bytes:");
}

}  // namespace

const char* algo_name(xd_gemm_algo algo) {
  constexpr const char* kNames[] = {"AUTO", "DIRECT", "SPLIT", "SEQUENTIAL"};
  constexpr const char* kOfCublasMp[] = {"CUBLASMP",
                                         "CUBLASMP_SPLIT_P2P",
                                         "CUBLASMP_SPLIT_MULTICAST",
                                         "CUBLASMP_ATOMIC_P2P",
                                         "CUBLASMP_ATOMIC_MULTICAST",
                                         "CUBLASMP_NO_OVERLAP",
                                         "CUBLASMP_FUSED"};
  const auto number = static_cast<unsigned>(algo);
  const unsigned of_cublasmp = number - XD_GEMM_ALGO_CUBLASMP;
  if (of_cublasmp < std::size(kOfCublasMp)) return kOfCublasMp[of_cublasmp];
  return number < std::size(kNames) ? kNames[number] : "?";
}

std::string Family::difference(const Record& mine, const Record& theirs) {
  const bool bulk =
      mine.call.operation == XD_GEMM_BULK || mine.call.operation == XD_GEMM_START_ALL_GATHER;
  if (theirs.tag != mine.tag) return of("tag", theirs.tag, mine.tag);
  if (theirs.flags != mine.flags) return of_flags(theirs.flags, mine.flags);
  if (theirs.a_type != mine.a_type) {
    return of_type(bulk ? "type of in" : "type of a", theirs.a_type, mine.a_type);
  }
  if (theirs.k != mine.k) return of(bulk ? "row bytes" : "K", theirs.k, mine.k);
  if (theirs.n != mine.n) return of("N", theirs.n, mine.n);
  if (theirs.b_type != mine.b_type) return of_type("type of b", theirs.b_type, mine.b_type);
  if (theirs.d_type != mine.d_type) return of_type("type of d", theirs.d_type, mine.d_type);
  if (theirs.epilogue != mine.epilogue) {
    return of("epilogue", epilogue_name(theirs.epilogue), epilogue_name(mine.epilogue));
  }
  if (theirs.scaling != mine.scaling) return "scales of another shape";
  if (theirs.fingerprint != mine.fingerprint) {
    return mine.call.operation == XD_GEMM_ALL_REDUCE
               ? of("M", theirs.fingerprint, mine.fingerprint)
               : "other tokens per rank (give tokens_per_rank where they differ)";
  }
  if (theirs.algo != mine.algo) {
    return of("algo", algo_name(static_cast<xd_gemm_algo>(theirs.algo)),
              algo_name(static_cast<xd_gemm_algo>(mine.algo)));
  }
  if (theirs.given != mine.given) return of_given(theirs.given, mine.given);
  return of("rows moved by", name_of(static_cast<Mover>(theirs.mover)),
            name_of(static_cast<Mover>(mine.mover)));
}

}  // namespace xd::gemm
