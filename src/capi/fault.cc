#include <crossdock/fault.h>

#include "capi/boundary.h"

xd_status xd_ll_group_fault_word(xd_ll_group* group, const uint64_t** word) {
  XD_REQUIRE_GIVEN("xd_ll_group_fault_word", group);
  XD_REQUIRE_GIVEN("xd_ll_group_fault_word", word);
  return xd::guarded_on("xd_ll_group_fault_word", group->group->comm(), [&] {
    group->group->comm().errors().check_process();
    *word = group->group->fault_word();
  });
}
