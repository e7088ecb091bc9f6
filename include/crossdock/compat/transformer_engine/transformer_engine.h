/* TransformerEngine's own header of tensors where it is on the include path, else Crossdock's. */
#ifndef CROSSDOCK_COMPAT_TRANSFORMER_ENGINE_H_
#define CROSSDOCK_COMPAT_TRANSFORMER_ENGINE_H_
#pragma GCC system_header /* include_next is an extension of GCC's and Clang's */

#if __has_include_next(<transformer_engine/transformer_engine.h>)
#include_next <transformer_engine/transformer_engine.h>
#endif
#include <crossdock/compat/te_tensor.h>

#endif /* CROSSDOCK_COMPAT_TRANSFORMER_ENGINE_H_ */
