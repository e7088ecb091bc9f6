// One endpoint of libfabric, with which a rank reaches all of its peers. A put is fi_writedata: one
// message that writes, and then completes at the peer with the tag.
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/warning_limit.h"
#include "net/fabric/door.h"
#include "net/fabric/library.h"
#include "net/fabric/tag_seal.h"

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

class FabricRegion final : public Region {
 public:
  FabricRegion(std::span<std::byte> memory, Owned<fid_mr> registration, bool by_address)
      : Region(memory), registration_(std::move(registration)), by_address_(by_address) {}

  RegionHandle remote() const override {
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
  Fabric(std::shared_ptr<const FabricLibrary> library, const Adapter& adapter);

  std::size_t max_put() const override { return info_->ep_attr->max_msg_size; }
  Bytes address() const override;
  void connect(int peer, std::span<const std::byte> address) override;
  std::string place_of(int peer) const override;
  std::unique_ptr<Region> expose(std::span<std::byte> memory) override;
  bool put(const Put& put) override;
  void poll(Events& events) override;
  bool buffers_puts() const override { return buffers_puts_; }
  bool vouches_for_tags() const override { return seal_.has_check != 0; }
  int sleep_on() override;
  void shut() override { door_.shut(); }
  void close() noexcept override;

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
    TagSeal seal;
    bool failed = false;
  };

  bool wants(std::uint64_t mr_mode) const {
    return (static_cast<std::uint64_t>(info_->domain_attr->mr_mode) & mr_mode) != 0;
  }
  void open_queue();
  void open_endpoint();
  Bytes name() const;  // of the endpoint
  std::string place_in(const void* name) const;
  void take_in(const fi_cq_data_entry& entry, Events& events);
  void refuse(const char* what) noexcept;
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
  int descriptor_ = -1;      // of the queue; -1 = its provider has none
  const bool buffers_puts_;  // in those of sockets
  Owned<fid_ep> endpoint_;
  Door door_;          // of the endpoint
  TagSeal seal_;       // of what comes
  std::string place_;  // where the endpoint is reached, for texts
  std::map<int, Peer> peers_;
  std::vector<std::unique_ptr<Operation>> operations_;
  Operation* free_ = nullptr;
  std::vector<PeerFailure> failures_;  // failures that poll() has not reported yet
  WarningLimit refused_{"messages of unknown senders, or damaged ones"};
};

// A call of libfabric that gives an object through a pointer.
template <class Object, class Call>
Owned<Object> made(const FabricLibrary& library, const char* name, Call&& call) {
  Object* object = nullptr;
  library.check(call(&object), name);
  return Owned<Object>(object);
}

Fabric::Fabric(std::shared_ptr<const FabricLibrary> library, const Adapter& adapter)
    : library_(std::move(library)),
      info_(find_info(*library_, adapter)),
      buffers_puts_(!is_rdma(adapter)) {
  if (!info_) {
    fail(XD_ERROR_SYSTEM, "libfabric ", fabric_version(*library_), " has no provider ",
         adapter.provider, " for ", adapter.name, adapter.name.empty() ? "" : " ", adapter.address);
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
  attributes.size = kEngineEvents;
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
  // Providers for TCP have their socket by now, and listen when they are enabled.
  Bytes early(256);
  std::size_t size = early.size();
  if (::fi_getname(&endpoint_->fid, early.data(), &size) == 0)
    door_ = Door(std::span(early).first(std::min(size, early.size())));
  library_->check(::fi_enable(endpoint_.get()), "fi_enable");
  if (!door_.is_there()) door_ = Door(name());
  place_ = place_in(name().data());
  seal_ = {.key = random_word(),
           .mask = static_cast<std::uint32_t>(random_word()),
           .has_check = info_->domain_attr->cq_data_size >= sizeof(std::uint64_t) ? 1u : 0u};
}

Bytes Fabric::name() const {
  Bytes name(256);
  std::size_t size = name.size();
  library_->check(::fi_getname(&endpoint_->fid, name.data(), &size), "fi_getname");
  name.resize(size);
  return name;
}

// The seal, and the endpoint's name.
Bytes Fabric::address() const {
  WireWriter writer;
  writer.put(seal_);
  writer.put_bytes(name());
  return writer.take();
}

// The socket behind the door goes with the endpoint.
void Fabric::close() noexcept {
  door_ = {};
  endpoint_.reset();
}

void Fabric::connect(int peer, std::span<const std::byte> address) {
  WireReader reader(address);
  const auto seal = reader.take<TagSeal>();
  const std::span<const std::byte> name = reader.rest();
  if (!reader.ok() || name.size() != this->name().size())
    fail(XD_ERROR_MISMATCH, "the address of peer ", peer, " is none of libfabric's here");
  Peer& known = peers_[peer];
  known.seal = seal;
  if (::fi_av_insert(addresses_.get(), name.data(), 1, &known.address, 0, nullptr) != 1)
    fail(XD_ERROR_MISMATCH, "libfabric refuses the address of peer ", peer);
  door_.admit(name);
}

std::string Fabric::place_of(int peer) const {
  Bytes raw(256);
  std::size_t size = raw.size();
  const auto known = peers_.find(peer);
  if (known == peers_.end() ||
      ::fi_av_lookup(addresses_.get(), known->second.address, raw.data(), &size) != 0)
    return {};
  return place_in(raw.data());
}

// libfabric writes "fi_sockaddr_in://10.0.0.3:40123".
std::string Fabric::place_in(const void* name) const {
  std::array<char, 256> text{};
  std::size_t size = text.size();
  ::fi_av_straddr(addresses_.get(), name, text.data(), &size);
  const std::string address(text.data(), ::strnlen(text.data(), text.size()));
  const std::size_t scheme = address.find("://");
  return concat(info_->fabric_attr->prov_name, ", ",
                scheme == std::string::npos ? address : address.substr(scheme + 3));
}

std::unique_ptr<Region> Fabric::expose(std::span<std::byte> memory) {
  // Of a key that nobody guesses, where the provider leaves the choice.
  const std::size_t bits = 8 * info_->domain_attr->mr_key_size;
  const std::uint64_t key = random_word() >> (bits < 64 ? 64 - bits : 0);
  auto registration = made<fid_mr>(*library_, "fi_mr_reg", [&](fid_mr** region) {
    return ::fi_mr_reg(domain_.get(), memory.data(), memory.size(), FI_WRITE | FI_REMOTE_WRITE, 0,
                       key, 0, region, nullptr);
  });
  if (wants(FI_MR_ENDPOINT)) {
    library_->check(::fi_mr_bind(registration.get(), &endpoint_->fid, 0), "fi_mr_bind");
    library_->check(::fi_mr_enable(registration.get()), "fi_mr_enable");
  }
  return std::make_unique<FabricRegion>(memory, std::move(registration), wants(FI_MR_VIRT_ADDR));
}

bool Fabric::put(const Put& put) {
  const Peer& peer = peers_.at(put.peer);
  if (peer.failed) return false;
  const auto& from = static_cast<const FabricRegion&>(*put.from);
  Operation& operation = take_operation();
  operation.peer = put.peer;
  operation.id = put.id;
  const std::int64_t result =
      ::fi_writedata(endpoint_.get(), from.memory().data() + put.from_offset, put.bytes,
                     from.descriptor(), peer.seal.close(put.tag), peer.address,
                     put.to.base + put.to_offset, put.to.key, &operation.context);
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
  for (std::int64_t i = 0; i < count; ++i) take_in(entries[static_cast<std::size_t>(i)], events);
  for (PeerFailure& failure : failures_) events.failed.push_back(std::move(failure));
  failures_.clear();
}

void Fabric::take_in(const fi_cq_data_entry& entry, Events& events) {
  if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
    const auto tag = seal_.open(entry.data);
    return tag ? events.arrived.push_back(*tag) : refuse("a tag that no peer makes");
  }
  if (entry.op_context == nullptr) return;
  auto* const operation = static_cast<Operation*>(entry.op_context);
  events.sent.push_back(operation->id);
  give_back(operation);
}

// A put that was not carried out; or what a provider makes of bytes that it does not understand,
// which anybody may have sent: then it says nothing of any put.
void Fabric::read_error() {
  fi_cq_err_entry error{};
  if (::fi_cq_readerr(queue_.get(), &error, 0) != 1) return;
  const std::string text = library_->text_of(error.err);
  if (error.op_context == nullptr) return refuse(text.c_str());
  auto* const operation = static_cast<Operation*>(error.op_context);
  fail_peer(operation->peer, text);
  give_back(operation);
}

// Strangers must not end what they cannot harm.
void Fabric::refuse(const char* what) noexcept {
  std::array<char, 512> text;
  std::snprintf(text.data(), text.size(), "refused at %s: %s (an unknown sender, or damaged bytes)",
                place_.c_str(), what);
  refused_.warn(text.data());
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
                                    const Adapter& adapter) {
  return std::make_unique<Fabric>(std::move(library), adapter);
}

}  // namespace xd::net
