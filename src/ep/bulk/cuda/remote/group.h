// A group's part in operations with ranks on other machines: its links, the thread that has them,
// and the memory that kernels use for them. Kernels do all the rest (ep/bulk/cuda/remote/work.cuh).
#pragma once

#include <cstddef>
#include <memory>

#include "comm/remote/links.h"
#include "comm/remote/routes.h"
#include "cuda/memory.h"
#include "ep/bulk/cuda/remote/params.h"
#include "ep/bulk/group.h"
#include "ep/proxied.h"
#include "net/proxy.h"

namespace xd::ep::cuda {

class RemoteGroup {
 public:
  // Collective. Throws UNSUPPORTED where a machine has several hosts, or there are too many.
  explicit RemoteGroup(const Group& group);
  // No kernel of the group runs any more.
  ~RemoteGroup();
  RemoteGroup(const RemoteGroup&) = delete;
  RemoteGroup& operator=(const RemoteGroup&) = delete;

  const RemoteDevice* device() const { return table_.as<RemoteDevice>(); }
  // The memory here that stands in for a remote rank's.
  HeapRange stand_in(int remote_rank) const;
  // The group goes, and this stays for kernels that still run: no more puts are counted.
  void outlive_group() { proxied_.outlive_group(); }

 private:
  RemoteGroup(const Group& group, std::unique_ptr<net::Engine> engine);
  void allocate(const Config& config);
  void describe(const Config& config);

  Comm& comm_;
  const RemoteRoutes routes_;
  const net::LinkMap map_;
  const std::size_t stand_in_bytes_;
  Proxied proxied_;
  xd::cuda::PinnedBlock frames_, words_;
  xd::cuda::DeviceBuffer state_, stand_ins_, rows_, scales_, answers_, answers_here_, picks_,
      table_;
  Segments areas_;  // of near ranks: RemoteMap
  std::unique_ptr<RemoteLinks> links_;
  std::unique_ptr<net::Proxy> proxy_;  // uses all of the above
};

}  // namespace xd::ep::cuda
