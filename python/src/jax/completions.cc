#include "completions.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace xdjax {
namespace {

struct Pool {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::size_t idle = 0;
};

// The pool is never destroyed, since its threads live as long as the process.
Pool& pool() {
  static auto* const made = new Pool;
  return *made;
}

void serve(Pool& pool) {
  pthread_setname_np(pthread_self(), "crossdock-done");
  std::unique_lock lock(pool.mutex);
  while (true) {
    ++pool.idle;
    pool.changed.wait(lock, [&] { return !pool.tasks.empty(); });
    --pool.idle;
    std::function<void()> task = std::move(pool.tasks.front());
    pool.tasks.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // outside the lock, since the task may own large objects
    lock.lock();
  }
}

}  // namespace

void run_soon(std::function<void()> task) {
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  all.tasks.push_back(std::move(task));
  if (all.idle < all.tasks.size()) std::thread([&all] { serve(all); }).detach();
  all.changed.notify_one();
}

}  // namespace xdjax
