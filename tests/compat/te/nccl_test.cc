// TransformerEngine's functions with a communicator of NCCL's, on GPUs.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "compat/te/ep_batch.h"
#include "compat/te/product.h"
#include "support/gtest_main.h"
#include "support/open_nccl.h"

namespace xd::test {
namespace {

struct UniqueId {
  char internal[128];
};

template <class Function>
Function look_up(void* library, const char* name) {
  void* const found = ::dlsym(library, name);
  if (found == nullptr) throw std::runtime_error(std::string("NCCL has no ") + name);
  return reinterpret_cast<Function>(found);
}

// NCCL's communicator of the ranks of a launch, which are processes. Rank 0's id goes through a
// file that only this user can read.
class NcclRanks {
 public:
  NcclRanks(void* library, const Rank& rank)
      : destroy_(look_up<int (*)(ncclComm_t)>(library, "ncclCommDestroy")) {
    const char* const port = std::getenv("MASTER_PORT");
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() /
        ("xd-te-nccl-" + std::to_string(::getuid()) + "-" + (port != nullptr ? port : ""));
    UniqueId id{};
    if (rank.rank == 0) {
      std::filesystem::create_directory(folder);
      std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
      require(look_up<int (*)(UniqueId*)>(library, "ncclGetUniqueId")(&id));
      std::ofstream(folder / "id", std::ios::binary).write(id.internal, sizeof(id.internal));
    }
    ok(xd_comm_barrier(rank.comm));
    std::ifstream(folder / "id", std::ios::binary).read(id.internal, sizeof(id.internal));
    ok(xd_comm_barrier(rank.comm));
    if (rank.rank == 0) std::filesystem::remove_all(folder);
    require(look_up<int (*)(ncclComm_t*, int, UniqueId, int)>(library, "ncclCommInitRank")(
        &comm, rank.num_ranks, id, rank.rank));
  }
  ~NcclRanks() { destroy_(comm); }
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  ncclComm_t comm = nullptr;

 private:
  static void require(int result) {
    if (result != 0) throw std::runtime_error("NCCL result " + std::to_string(result));
  }

  int (*const destroy_)(ncclComm_t);
};

class TeNccl : public testing::Test {
 protected:
  void SetUp() override {
    if (world().memory().device().device_type == kDLCPU) GTEST_SKIP() << "NCCL needs GPUs";
    library_ = open_nccl();
    if (library_ == nullptr) GTEST_SKIP() << "libnccl.so.2 was not found (XD_NCCL_LIB may name it)";
  }

  void* library_ = nullptr;
};

TEST_F(TeNccl, ExpertsAreReachedThroughItsCommunicator) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const NcclRanks nccl(library_, rank);
    TeBatch direct(rank, c), batch(rank, c);
    direct.run_all_directly(rank.comm, c.config(rank.rank));
    // With zero_copy as well: the tensors lie where only NCCL may know them.
    for (const int zero_copy : {0, 1}) {
      NVTEEpGroupConfig config = te_config(c.config(rank.rank));
      config.zero_copy = zero_copy;
      const TeGroup group(nccl.comm, config);
      EXPECT_NE(crossdock::te::ep_comm(), rank.comm);
      batch.use_group();
      batch.run_all();
      batch.expect_equal(direct);
    }
  });
}

TEST_F(TeNccl, ProductsAreComputedThroughItsCommunicator) {
  on_every_rank([&](Rank& rank) {
    const NcclRanks nccl(library_, rank);
    const TeContext ctx = make_te_context(rank, nccl.comm);
    const std::int64_t m = 8, n = 16, k = std::int64_t{8} * rank.num_ranks;
    Tensor a(rank, kF32, {m, 8}), b(rank, kF32, {n, 8}), d(rank, kF32, {n, m});
    a.write(std::vector<float>(64, 1.0f));
    b.write(std::vector<float>(128, static_cast<float>(rank.rank + 1)));
    multiply(rank, ctx.get(), XD_GEMM_ALL_REDUCE, {m, n, k}, a, b, d);
    const auto sum = static_cast<float>(4 * rank.num_ranks * (rank.num_ranks + 1));
    EXPECT_EQ(d.read_as<float>(), std::vector<float>(128, sum));
  });
}

}  // namespace
}  // namespace xd::test
