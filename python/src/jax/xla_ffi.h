// XLA's foreign function interface: headers of the installed jaxlib, which need no library.
#pragma once

#include <xla/ffi/api/ffi.h>
