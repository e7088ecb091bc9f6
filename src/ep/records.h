// What calls say of themselves in their entry records: the part that must be equal on all ranks,
// but for the plan's fingerprint.
#pragma once

#include "ep/calls.h"
#include "ep/wire.h"

namespace xd::ep {

Record describe(const PrepareCall& call);
Record describe(const DispatchCall& call);
Record describe(const CombineCall& call);
Record describe(const DispatchBwdCall& call);
Record describe(const CombineBwdCall& call);

}  // namespace xd::ep
