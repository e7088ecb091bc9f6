// What passes need of their group's kind of device. executors.cc alone names the kinds.
#pragma once

#include <memory>

#include "ep/bulk/group.h"
#include "moe/streams.h"

namespace xd::moe {

// The streams of an executor, made with its device; never null.
std::unique_ptr<Streams> make_streams(const DLDevice& device);
// The most multiprocessors that a call of an operation of the group may ask for.
int most_sms(const ep::Group& group);

namespace cuda {  // in builds for CUDA
std::unique_ptr<Streams> make_streams(int device);
int most_sms(const ep::Group& group);
}  // namespace cuda

}  // namespace xd::moe
