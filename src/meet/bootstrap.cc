#include "meet/bootstrap.h"

#include "base/error.h"
#include "base/options.h"
#include "meet/environment.h"
#include "meet/messages.h"
#include "meet/nccl/library.h"
#include "meet/unique_id.h"

namespace xd {
namespace {

class LoneBootstrap final : public Bootstrap {
 public:
  LoneBootstrap() : Bootstrap(0, 1) {}
  std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline&) override {
    return {make(nullptr)};
  }
};

// Meets through the caller's all-gather, which bounds its own waiting.
class CallbackBootstrap final : public Bootstrap {
 public:
  explicit CallbackBootstrap(const xd_comm_config& config)
      : Bootstrap(config.rank, config.num_ranks),
        call_(config.all_gather),
        context_(config.all_gather_context) {}

  std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline&) override {
    const Bytes blob = make(nullptr);
    const Bytes send = make_block(blob);
    Bytes received(kBlockBytes * static_cast<std::size_t>(num_ranks()));
    const int error = call_(context_, send.data(), received.data(), send.size());
    if (error != 0)
      fail(XD_ERROR_SYSTEM, "config.all_gather returned ", error, " on rank ", rank());
    return read_blocks(received, num_ranks(), blob.size(), "config.all_gather");
  }
  bool can_repeat() const override { return true; }

 private:
  xd_all_gather_fn call_;
  void* context_;
};

void check_ranks(const xd_comm_config& config) {
  XD_REQUIRE(config.num_ranks >= 1 && config.num_ranks <= kMaxRanks,
             "config.num_ranks = ", config.num_ranks, ", expected 1 to ", kMaxRanks);
  XD_REQUIRE(config.rank >= 0 && config.rank < config.num_ranks, "config.rank = ", config.rank,
             ", expected 0 to ", config.num_ranks - 1);
}

std::unique_ptr<Bootstrap> by_environment(const xd_comm_config& config) {
  if (config.num_ranks != 0) check_ranks(config);
  if (config.num_ranks == 1) return make_lone_bootstrap();
  RankEnvironment environment = read_rank_environment(config);
  if (environment.num_ranks == 1) return make_lone_bootstrap();
  return meet_by_environment(std::move(environment));
}

std::unique_ptr<Bootstrap> by_nccl(const xd_comm_config& config) {
  XD_REQUIRE(config.nccl_comm != nullptr, "config.nccl_comm = NULL, expected an ncclComm_t");
  return bootstrap_by_nccl(config);
}

}  // namespace

std::unique_ptr<Bootstrap> make_lone_bootstrap() { return std::make_unique<LoneBootstrap>(); }

std::unique_ptr<Bootstrap> make_bootstrap(const xd_comm_config& config) {
  const std::int32_t kind = raw_enum(config.bootstrap);
  if (kind == XD_BOOTSTRAP_ENVIRONMENT) return by_environment(config);
  if (kind == XD_BOOTSTRAP_NCCL) return by_nccl(config);
  check_ranks(config);
  if (kind == XD_BOOTSTRAP_UNIQUE_ID) {
    if (config.num_ranks == 1) return make_lone_bootstrap();
    XD_REQUIRE(config.unique_id != nullptr,
               "config.unique_id = NULL, expected an id from xd_unique_id_create");
    return meet_at(decode_unique_id(*config.unique_id), config.rank, config.num_ranks);
  }
  XD_REQUIRE(kind == XD_BOOTSTRAP_ALL_GATHER, "config.bootstrap = ", kind,
             ", expected one of xd_bootstrap");
  XD_REQUIRE(config.all_gather != nullptr, "config.all_gather = NULL, expected a function");
  if (config.num_ranks == 1) return make_lone_bootstrap();
  return std::make_unique<CallbackBootstrap>(config);
}

Bytes make_block(std::span<const std::byte> blob) {
  XD_CHECK(blob.size() <= Bootstrap::kMaxBlob);
  WireWriter block;
  block.put(std::uint64_t{blob.size()});
  block.put_bytes(blob);
  Bytes bytes = block.take();
  bytes.resize(kBlockBytes);
  return bytes;
}

std::vector<Bytes> read_blocks(std::span<const std::byte> blocks, int num_ranks,
                               std::size_t blob_bytes, const char* what) {
  std::vector<Bytes> blobs;
  WireReader in(blocks);
  for (int r = 0; r < num_ranks; ++r) {
    WireReader block(in.take_bytes(kBlockBytes));
    const auto size = block.take<std::uint64_t>();
    if (size != blob_bytes)
      fail(XD_ERROR_MISMATCH, what, " brought ", size, " bytes of rank ", r, ", expected ",
           blob_bytes, ": it mixes up calls, or rank ", r, " runs another version of the library");
    const auto bytes = block.take_bytes(size);
    blobs.emplace_back(bytes.begin(), bytes.end());
  }
  return blobs;
}

}  // namespace xd
