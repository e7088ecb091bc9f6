// A forked child has its parent's communicators and may destroy them: every other call is refused.
#define XD_EXPERIMENTAL 1
#include <crossdock/channel.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conformance/batch.h"
#include "faults/rank_program.h"
#include "faults/thread_ranks.h"

namespace xd::test {
namespace {

// In the child: the line of the first call that is not refused, or 0. Nothing of the test's that
// allocates or prints: other threads' locks may be held for ever here.
int first_call_not_refused(xd_comm* comm, xd_ep_group* group, xd_channel* channel, void* memory) {
#define XD_REFUSED(call) \
  if ((call) != XD_ERROR_INVALID_ARGUMENT) return __LINE__
  xd_error_info error = XD_ERROR_INFO_INIT;
  xd_comm_info info = XD_COMM_INFO_INIT;
  xd_mem_info memory_info = XD_MEM_INFO_INIT;
  xd_ep_status status = XD_EP_STATUS_INIT;
  xd_mem_handle handle{};
  const volatile uint64_t* word = nullptr;
  void* other = nullptr;
  const xd_ep_config config = plain_case(1).config(0);
  xd_ep_group* another = nullptr;
  XD_REFUSED(xd_comm_barrier(comm));
  XD_REFUSED(xd_comm_abort(comm));
  XD_REFUSED(xd_comm_error(comm, &error));
  XD_REFUSED(xd_comm_get_info(comm, &info));
  XD_REFUSED(xd_mem_alloc(comm, 64, &other));
  XD_REFUSED(xd_mem_free(comm, memory));
  XD_REFUSED(xd_mem_grow(comm, 4096));
  XD_REFUSED(xd_mem_get_info(comm, &memory_info));
  XD_REFUSED(xd_mem_export(comm, memory, &handle));
  XD_REFUSED(xd_mem_import(comm, &handle, &other));
  XD_REFUSED(xd_ep_group_create(comm, &config, &another));
  XD_REFUSED(xd_ep_group_status(group, &status));
  XD_REFUSED(xd_ep_group_watch(group, &word));
  xd_channel* another_channel = nullptr;
  std::int32_t reached = 0;
  XD_REFUSED(xd_channel_create(comm, 0, memory, 64, 1, &another_channel));
  XD_REFUSED(xd_channel_put(channel, 0, memory, 8, 0));
  XD_REFUSED(xd_channel_wait(channel, 0, 0));
  XD_REFUSED(xd_channel_test(channel, 0, 0, &reached));
  XD_REFUSED(xd_channel_flush(channel));
  XD_REFUSED(xd_ep_join_failed(group, XD_EP_PREPARE, "", nullptr));
#undef XD_REFUSED
  return 0;
}

TEST(ForkedChild, IsRefusedByEveryCallButDestroying) {
  on_thread_ranks(1, 30000, [](Rank& rank, Comm& comm) {
    Group group = make_group(rank.comm, plain_case(1).config(0));
    void* memory = nullptr;
    ASSERT_EQ(xd_mem_grow(rank.comm, 4096), XD_SUCCESS);
    ASSERT_EQ(xd_mem_alloc(rank.comm, 64, &memory), XD_SUCCESS);
    xd_channel* channel = nullptr;
    ASSERT_EQ(xd_channel_create(rank.comm, 0, memory, 64, 1, &channel), XD_SUCCESS);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(20);
      const int line = first_call_not_refused(rank.comm, group.get(), channel, memory);
      if (line != 0) ::_exit(line);
      ::_exit(xd_ep_group_destroy(group.get()) == XD_SUCCESS &&
                      xd_channel_destroy(channel) == XD_SUCCESS &&
                      xd_comm_destroy(comm.get()) == XD_SUCCESS
                  ? 0
                  : 1);
    }
    int ended = 0;
    ASSERT_EQ(::waitpid(child, &ended, 0), child);
    ASSERT_TRUE(WIFEXITED(ended)) << "signal " << WTERMSIG(ended);
    EXPECT_EQ(WEXITSTATUS(ended), 0) << "the line of the call that was not refused; 1: destroying";
    // The parent's goes on.
    EXPECT_EQ(xd_channel_put(channel, 8, memory, 8, 0), XD_SUCCESS);
    EXPECT_EQ(xd_channel_wait(channel, 0, 1), XD_SUCCESS);
    EXPECT_EQ(xd_channel_destroy(channel), XD_SUCCESS);
    EXPECT_EQ(xd_mem_free(rank.comm, memory), XD_SUCCESS);
    EXPECT_EQ(xd_comm_barrier(rank.comm), XD_SUCCESS);
  });
}

}  // namespace
}  // namespace xd::test
