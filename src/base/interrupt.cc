#include "base/interrupt.h"

#include "base/error.h"

namespace xd {
namespace {

constexpr int kAskMs = 100;

struct Request {
  InterruptFn ask = nullptr;
  void* context = nullptr;
};

thread_local Request request;

}  // namespace

void set_interrupt(InterruptFn ask, void* context) { request = {ask, context}; }

Interruption::Interruption() {
  if (request.ask != nullptr) when_ = Deadline::after_ms(kAskMs);
}

bool Interruption::requested() {
  if (!when_ || !when_->passed()) return false;
  when_ = Deadline::after_ms(kAskMs);
  return request.ask != nullptr && request.ask(request.context) != 0;
}

void Interruption::check() {
  if (requested()) fail(XD_ERROR_ABORTED, "the caller has given up waiting");
}

}  // namespace xd
