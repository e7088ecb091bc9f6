// The needs that passes have of their group's kind of device. executors.cc alone names the kinds.
#pragma once

#include <initializer_list>
#include <memory>

#include "base/tensor.h"
#include "ep/bulk/group.h"
#include "moe/streams.h"

namespace xd::moe {

// The streams of an executor, made with its device; never null.
std::unique_ptr<Streams> make_streams(const DLDevice& device);
// The most multiprocessors that a call of an operation of the group may ask for.
int most_sms(const ep::Group& group);
// Throws INVALID_ARGUMENT naming a tensor that lies where kernels of the device cannot touch it.
void require_memory(const DLDevice& device, std::initializer_list<Tensor> tensors);

namespace cuda {  // in builds for CUDA
std::unique_ptr<Streams> make_streams(int device);
int most_sms(const ep::Group& group);
void require_memory(int device, std::initializer_list<Tensor> tensors);
}  // namespace cuda

}  // namespace xd::moe
