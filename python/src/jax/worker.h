// A thread that runs tasks one after another, in the order in which they were posted.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace xdjax {

class Worker {
 public:
  using Task = std::function<void()>;

  Worker();
  // Runs what has been posted, then ends. May be called by a task: the thread then ends by itself.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Any thread; does not wait. Tasks throw nothing.
  void post(Task task);

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    bool closed = false;
  };

  static void serve(const std::shared_ptr<Queue>& queue);

  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace xdjax
