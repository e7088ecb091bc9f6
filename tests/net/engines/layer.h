// An engine on another one, which does all that a layer does not do itself.
#pragma once

#include <memory>
#include <utility>

#include "net/engine.h"

namespace xd::net {

class EngineLayer : public Engine {
 public:
  explicit EngineLayer(std::unique_ptr<Engine> below) : below_(std::move(below)) {}

  std::size_t max_put() const override { return below_->max_put(); }
  Bytes address() const override { return below_->address(); }
  void connect(int peer, std::span<const std::byte> address) override {
    below_->connect(peer, address);
  }
  std::string place_of(int peer) const override { return below_->place_of(peer); }
  std::unique_ptr<Region> expose(std::span<std::byte> memory) override {
    return below_->expose(memory);
  }
  bool put(const Put& put) override { return below_->put(put); }
  void poll(Events& events) override { below_->poll(events); }
  bool buffers_puts() const override { return below_->buffers_puts(); }
  bool vouches_for_tags() const override { return below_->vouches_for_tags(); }
  int sleep_on() override { return below_->sleep_on(); }
  void shut() override { below_->shut(); }
  void close() noexcept override { below_->close(); }

 protected:
  Engine& below() { return *below_; }
  const Engine& below() const { return *below_; }

 private:
  const std::unique_ptr<Engine> below_;
};

}  // namespace xd::net
