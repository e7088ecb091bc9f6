#include "worker.h"

#include <utility>

namespace xdjax {

Worker::Worker() : thread_([queue = queue_] { serve(queue); }) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
  }
  queue_->changed.notify_one();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Worker::post(Task task) {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->tasks.push_back(std::move(task));
  }
  queue_->changed.notify_one();
}

void Worker::serve(const std::shared_ptr<Queue>& queue) {
  std::unique_lock lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->closed || !queue->tasks.empty(); });
    if (queue->tasks.empty()) return;
    Task task = std::move(queue->tasks.front());
    queue->tasks.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds may end this worker, which takes the lock
    lock.lock();
  }
}

}  // namespace xdjax
