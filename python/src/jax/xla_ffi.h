// XLA's foreign function interface: headers of the installed jaxlib, nothing of it to link.
#pragma once

#include <xla/ffi/api/ffi.h>
