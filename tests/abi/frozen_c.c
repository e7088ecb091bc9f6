/* The headers and the frozen numbers as a C11 compiler sees them. */
#include "abi/frozen_moe.h"
#include "abi/initialised.h"

/* The initialisers must be constant expressions in C, and start with the struct's size. */
#define DEFINE(type, init) static const type initial_##type = init;
XD_INITIALISED(DEFINE)

/* Number of initialisers whose struct_size is not the struct's. */
int wrong_initialisers_in_c(void);
int wrong_initialisers_in_c(void) {
  int wrong = 0;
#define COUNT_WRONG(type, init) wrong += initial_##type.struct_size != sizeof(type);
  XD_INITIALISED(COUNT_WRONG)
  return wrong;
}
