// One endpoint of libfabric, with which a rank reaches all of its peers. A put is fi_writedata: one
// message that writes, and then completes at the peer with the tag.
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <array>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "base/error.h"
#include "net/fabric/library.h"

namespace xd::net {
namespace {

// Any object of libfabric.
struct Close {
  template <class Object>
  void operator()(Object* object) const {
    ::fi_close(&object->fid);
  }
};
template <class Object>
using Owned = std::unique_ptr<Object, Close>;

std::uint64_t random_word() {
  std::random_device device;  // 32 bits at a time, from the kernel or the processor
  return std::uint64_t{device()} << 32 | device();
}

class FabricRoom final : public Room {
 public:
  FabricRoom(std::span<std::byte> memory, Owned<fid_mr> registration, bool by_address)
      : Room(memory), registration_(std::move(registration)), by_address_(by_address) {}

  RemoteRoom remote() const override {
    return {.base = by_address_ ? reinterpret_cast<std::uintptr_t>(memory().data()) : 0,
            .key = ::fi_mr_key(registration_.get()),
            .bytes = memory().size()};
  }
  void* descriptor() const { return ::fi_mr_desc(registration_.get()); }

 private:
  const Owned<fid_mr> registration_;
  const bool by_address_;
};

class Fabric final : public Engine {
 public:
  Fabric(std::shared_ptr<const FabricLibrary> library, const std::string& provider,
         const std::string& address);

  std::size_t max_put() const override { return info_->ep_attr->max_msg_size; }
  Bytes address() const override;
  void connect(int peer, std::span<const std::byte> address) override;
  std::string place_of(int peer) const override;
  std::unique_ptr<Room> expose(std::span<std::byte> memory) override;
  bool put(const Put& put) override;
  void poll(Events& events) override;
  int sleep_on() override;
  void close() noexcept override { endpoint_.reset(); }

 private:
  // A put under way. libfabric may use the context until it has completed.
  struct Operation {
    fi_context2 context;
    int peer;
    std::uint64_t id;
    Operation* next_free;
  };
  struct Peer {
    fi_addr_t address = FI_ADDR_UNSPEC;
    bool failed = false;
  };

  bool wants(std::uint64_t mr_mode) const {
    return (static_cast<std::uint64_t>(info_->domain_attr->mr_mode) & mr_mode) != 0;
  }
  void open_queue();
  void open_endpoint();
  Operation& take_operation();
  void give_back(Operation* operation) { operation->next_free = std::exchange(free_, operation); }
  void fail_peer(int peer, std::string text);
  void read_error();

  const std::shared_ptr<const FabricLibrary> library_;
  Infos info_;
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_av> addresses_;
  Owned<fid_cq> queue_;
  int descriptor_ = -1;  // of the queue; -1 = its provider has none
  Owned<fid_ep> endpoint_;
  std::map<int, Peer> peers_;
  std::vector<std::unique_ptr<Operation>> operations_;
  Operation* free_ = nullptr;
  std::vector<PeerFailure> failures_;  // that poll() has not reported yet
};

// A call of libfabric that gives an object through a pointer.
template <class Object, class Call>
Owned<Object> made(const FabricLibrary& library, const char* name, Call&& call) {
  Object* object = nullptr;
  library.check(call(&object), name);
  return Owned<Object>(object);
}

Fabric::Fabric(std::shared_ptr<const FabricLibrary> library, const std::string& provider,
               const std::string& address)
    : library_(std::move(library)), info_(find_infos(*library_, address, provider)) {
  if (!info_) {
    fail(XD_ERROR_SYSTEM, "libfabric ", fabric_version(*library_), " has no provider ", provider,
         " for ", address);
  }
  fabric_ = made<fid_fabric>(*library_, "fi_fabric", [&](fid_fabric** fabric) {
    return library_->fabric(info_->fabric_attr, fabric, nullptr);
  });
  domain_ = made<fid_domain>(*library_, "fi_domain", [&](fid_domain** domain) {
    return ::fi_domain(fabric_.get(), info_.get(), domain, nullptr);
  });
  fi_av_attr attributes{};
  attributes.type = info_->domain_attr->av_type;
  addresses_ = made<fid_av>(*library_, "fi_av_open", [&](fid_av** addresses) {
    return ::fi_av_open(domain_.get(), &attributes, addresses, nullptr);
  });
  open_queue();
  open_endpoint();
}

void Fabric::open_queue() {
  fi_cq_attr attributes{};
  attributes.format = FI_CQ_FORMAT_DATA;
  attributes.size = 8192;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  if (::fi_cq_open(domain_.get(), &attributes, &queue, nullptr) == 0) {
    queue_.reset(queue);
    library_->check(::fi_control(&queue->fid, FI_GETWAIT, &descriptor_), "fi_control");
    return;
  }
  attributes.wait_obj = FI_WAIT_NONE;
  queue_ = made<fid_cq>(*library_, "fi_cq_open", [&](fid_cq** other) {
    return ::fi_cq_open(domain_.get(), &attributes, other, nullptr);
  });
}

void Fabric::open_endpoint() {
  endpoint_ = made<fid_ep>(*library_, "fi_endpoint", [&](fid_ep** endpoint) {
    return ::fi_endpoint(domain_.get(), info_.get(), endpoint, nullptr);
  });
  library_->check(::fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "fi_ep_bind");
  library_->check(::fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  library_->check(::fi_enable(endpoint_.get()), "fi_enable");
}

Bytes Fabric::address() const {
  Bytes name(256);
  std::size_t size = name.size();
  library_->check(::fi_getname(&endpoint_->fid, name.data(), &size), "fi_getname");
  name.resize(size);
  return name;
}

void Fabric::connect(int peer, std::span<const std::byte> address) {
  if (address.size() != this->address().size())
    fail(XD_ERROR_MISMATCH, "the address of peer ", peer, " is none of libfabric's here");
  fi_addr_t& found = peers_[peer].address;
  if (::fi_av_insert(addresses_.get(), address.data(), 1, &found, 0, nullptr) != 1)
    fail(XD_ERROR_MISMATCH, "libfabric refuses the address of peer ", peer);
}

// libfabric writes "fi_sockaddr_in://10.0.0.3:40123".
std::string Fabric::place_of(int peer) const {
  Bytes raw(256);
  std::size_t size = raw.size();
  const auto known = peers_.find(peer);
  if (known == peers_.end() ||
      ::fi_av_lookup(addresses_.get(), known->second.address, raw.data(), &size) != 0)
    return {};
  std::array<char, 256> text{};
  size = text.size();
  ::fi_av_straddr(addresses_.get(), raw.data(), text.data(), &size);
  const std::string address(text.data(), ::strnlen(text.data(), text.size()));
  const std::size_t scheme = address.find("://");
  return concat(info_->fabric_attr->prov_name, ", ",
                scheme == std::string::npos ? address : address.substr(scheme + 3));
}

std::unique_ptr<Room> Fabric::expose(std::span<std::byte> memory) {
  // Of a key that nobody guesses, where the provider leaves the choice.
  const std::size_t bits = 8 * info_->domain_attr->mr_key_size;
  const std::uint64_t key = random_word() >> (bits < 64 ? 64 - bits : 0);
  auto registration = made<fid_mr>(*library_, "fi_mr_reg", [&](fid_mr** room) {
    return ::fi_mr_reg(domain_.get(), memory.data(), memory.size(), FI_WRITE | FI_REMOTE_WRITE, 0,
                       key, 0, room, nullptr);
  });
  if (wants(FI_MR_ENDPOINT)) {
    library_->check(::fi_mr_bind(registration.get(), &endpoint_->fid, 0), "fi_mr_bind");
    library_->check(::fi_mr_enable(registration.get()), "fi_mr_enable");
  }
  return std::make_unique<FabricRoom>(memory, std::move(registration), wants(FI_MR_VIRT_ADDR));
}

bool Fabric::put(const Put& put) {
  const Peer& peer = peers_.at(put.peer);
  if (peer.failed) return false;
  const auto& from = static_cast<const FabricRoom&>(*put.from);
  Operation& operation = take_operation();
  operation.peer = put.peer;
  operation.id = put.id;
  const std::int64_t result = ::fi_writedata(
      endpoint_.get(), from.memory().data() + put.from_offset, put.bytes, from.descriptor(),
      put.tag, peer.address, put.to.base + put.to_offset, put.to.key, &operation.context);
  if (result == 0) return true;
  give_back(&operation);
  if (result == -FI_EAGAIN) return false;
  fail_peer(put.peer, concat("fi_writedata: ", library_->text_of(result)));
  return true;
}

void Fabric::poll(Events& events) {
  std::array<fi_cq_data_entry, 32> entries;
  const std::int64_t count = ::fi_cq_read(queue_.get(), entries.data(), entries.size());
  if (count == -FI_EAVAIL) {
    read_error();
  } else if (count != -FI_EAGAIN && count < 0) {
    fail_peer(-1, concat("fi_cq_read: ", library_->text_of(count)));
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const fi_cq_data_entry& entry = entries[static_cast<std::size_t>(i)];
    if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
      events.arrived.push_back(static_cast<std::uint32_t>(entry.data));
    } else if (entry.op_context != nullptr) {
      auto* const operation = static_cast<Operation*>(entry.op_context);
      events.sent.push_back(operation->id);
      give_back(operation);
    }
  }
  for (PeerFailure& failure : failures_) events.failed.push_back(std::move(failure));
  failures_.clear();
}

// A put that was not carried out, or something that the endpoint met by itself.
void Fabric::read_error() {
  fi_cq_err_entry error{};
  if (::fi_cq_readerr(queue_.get(), &error, 0) != 1) return;
  const std::string text = library_->text_of(error.err);
  if (error.op_context == nullptr) return fail_peer(-1, text);
  auto* const operation = static_cast<Operation*>(error.op_context);
  fail_peer(operation->peer, text);
  give_back(operation);
}

int Fabric::sleep_on() {
  if (descriptor_ < 0 || !failures_.empty()) return -1;
  fid* queue = &queue_->fid;
  return ::fi_trywait(fabric_.get(), &queue, 1) == 0 ? descriptor_ : -1;
}

Fabric::Operation& Fabric::take_operation() {
  if (free_ == nullptr) give_back(operations_.emplace_back(std::make_unique<Operation>()).get());
  return *std::exchange(free_, free_->next_free);
}

// Once for each peer.
void Fabric::fail_peer(int peer, std::string text) {
  if (std::exchange(peers_[peer].failed, true)) return;
  failures_.push_back({peer, std::move(text)});
}

}  // namespace

std::unique_ptr<Engine> open_fabric(std::shared_ptr<const FabricLibrary> library,
                                    const std::string& provider, const std::string& address) {
  return std::make_unique<Fabric>(std::move(library), provider, address);
}

}  // namespace xd::net
