/* For programs with #include <transformer_engine/comm_window.h>. */
#include <crossdock/compat/te_comm_window.h>
