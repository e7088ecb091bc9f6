// The library of the tests that stands in the place of cuBLASMp and of its NCCL, and engines on it.
// They need no device.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "gemm/cublasmp/engine.h"
#include "gemm/cublasmp/library.h"

namespace xd::gemm::cublasmp {

class CublasMpFake {
 public:
  explicit CublasMpFake(const char* name = CUBLASMP_FAKE_NAME) : library_(find_library(name)) {
    opened_ = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    begin();
    end_waits();
  }
  ~CublasMpFake() {
    end_waits();
    ::dlclose(opened_);
  }
  CublasMpFake(const CublasMpFake&) = delete;
  CublasMpFake& operator=(const CublasMpFake&) = delete;

  const Library& library() const { return library_; }
  // Sets the versions of cuBLASMp, NCCL and cuBLASLt; without arguments to what they are at first.
  void have_versions(int mp = 1000, int nccl = 22902, std::size_t lt = 130100) {
    function<void(int, int, std::size_t)>("fake_versions")(mp, nccl, lt);
  }
  // From now on `failing` fails with that status.
  void begin(const char* failing = "", int status = 6, std::size_t bytes = 100) {
    function<void(const char*, int, std::size_t)>("fake_begin")(failing, status, bytes);
  }
  // The functions that have been called, and since begin().
  std::string text() const { return function<const char*()>("fake_text")(); }
  bool has_called(const char* name) const { return text().find(name) != std::string::npos; }
  std::string taken() {
    std::string all = text();
    begin();
    return all;
  }
  // A function that waits until the communicator is ended, or end_waits() is called.
  void let_wait(const char* waiting) { function<void(const char*)>("fake_wait")(waiting); }
  void end_waits() { function<void()>("fake_end_waits")(); }
  void need_host_memory(std::size_t bytes) {
    function<void(std::size_t)>("fake_need_host_memory")(bytes);
  }
  std::size_t read_host_memory() const {
    return function<std::size_t()>("fake_read_host_memory")();
  }

 private:
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(opened_, name));
  }

  const Library library_;
  void* opened_ = nullptr;
};

// Rank 1 of two, and a product of theirs.
class CublasMpEngine : public testing::Test {
 protected:
  CublasMpEngine() {
    config_.ranks = 2;
    config_.operations = XD_GEMM_BIT(XD_GEMM_REDUCE_SCATTER);
    config_.max_tokens = 64;
    config_.max_k = config_.max_n = 128;
  }

  static Ranks ranks(nccl::Comm lent = nullptr) {
    Ranks ranks{.count = 2, .rank = 1, .lent = lent};
    ranks.id.bytes[0] = 'u';
    return ranks;
  }
  Engine engine(nccl::Comm lent = nullptr) {
    return Engine(fake_.library(), config_, ranks(lent), xd::cuda::Stream());
  }
  // reduce_scatter of 6 tokens, N = 16 and K = 8 on each of two ranks.
  ProductCall call() const {
    ProductCall call{.operation = XD_GEMM_REDUCE_SCATTER};
    call.a.type = call.b.type = call.d.type = DType::bf16;
    call.algo = XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P;
    call.a_rows = 6;
    call.n = 16;
    call.k = 8;
    call.alpha = 0.5f;
    call.shares = Shares(starts_);
    return call;
  }
  Description description() const { return describe(call(), config_, DType::bf16, false); }

  CublasMpFake fake_;
  Config config_;
  const std::vector<std::int64_t> starts_{0, 3, 6};
};

}  // namespace xd::gemm::cublasmp
