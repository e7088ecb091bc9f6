// A thread that runs tasks one after another, in the order in which they were posted.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace xdjax {

class Worker {
 public:
  using Task = std::function<void()>;

  Worker();
  // Waits for all tasks that have been posted: never call it in a task.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Any thread; does not wait. Tasks throw nothing.
  void post(Task task);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool closed_ = false;
  std::thread thread_;  // last, since it uses the other members
};

}  // namespace xdjax
