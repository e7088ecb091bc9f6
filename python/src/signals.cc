// Signals while Python's main thread waits inside the library.
//
// Python notes a signal when it comes, and runs its handler when its main thread asks. A wait of
// the library asks for it (xd_set_interrupt), so that Ctrl-C need not wait for the timeout.
#include "errors.h"

namespace xdpy {
namespace {

thread_local bool asking = false;  // set up for this thread
thread_local bool in_handler = false;
thread_local bool raised = false;  // Python's error indicator has a handler's exception

int ask(void*) {
  const nb::gil_scoped_acquire gil;
  if (raised) return 1;
  in_handler = true;
  raised = PyErr_CheckSignals() != 0;
  in_handler = false;
  return raised ? 1 : 0;
}

bool on_main_thread() {
  const nb::object main = nb::module_::import_("threading").attr("main_thread")();
  return nb::cast<unsigned long>(main.attr("ident")) == PyThread_get_thread_ident();
}

}  // namespace

void handle_signals_in_waits() {
  if (asking) return;
  asking = true;
  // Other threads never run handlers. If they asked for the GIL while the interpreter exits, they
  // might also be ended inside the library.
  if (on_main_thread()) xd_set_interrupt(&ask, nullptr);
}

void throw_what_a_handler_raised() {
  if (!raised) return;
  raised = false;
  throw nb::python_error();
}

bool in_signal_handler() { return in_handler; }

}  // namespace xdpy
