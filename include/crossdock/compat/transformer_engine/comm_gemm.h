/* For programs with #include <transformer_engine/comm_gemm.h>. */
#include <transformer_engine/transformer_engine.h>
/* The tensors first: they may be TransformerEngine's. */
#include <crossdock/compat/te_comm_gemm.h>
