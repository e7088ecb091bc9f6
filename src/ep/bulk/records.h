// Describes calls for their entry records: the part that must be equal on all ranks, except for the
// plan's fingerprint.
#pragma once

#include "ep/bulk/calls.h"
#include "ep/bulk/wire.h"
#include "ep/plan/slot_table.h"

namespace xd::ep {

Record record_of(const PrepareCall& call);
Record record_of(const SlotTable& table);
Record record_of(const DispatchCall& call);
Record record_of(const CombineCall& call);
Record record_of(const DispatchBwdCall& call);
Record record_of(const CombineBwdCall& call);

}  // namespace xd::ep
