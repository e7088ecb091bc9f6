/* Crossdock: how TransformerEngine's functions fail here. TransformerEngine's throw
 * std::runtime_error; so do these, and the exception has Crossdock's status. C++17. */
#ifndef CROSSDOCK_COMPAT_TE_ERROR_H_
#define CROSSDOCK_COMPAT_TE_ERROR_H_

#include <crossdock/status.h>

#include <stdexcept>
#include <string>

/* Functions of TransformerEngine's names. Each program and shared library has its own copy, which
 * other libraries do not see: so libtransformer_engine.so, if it is loaded beside, keeps calling
 * its own. */
#define XD_TE_FUNCTION inline __attribute__((visibility("hidden")))

namespace crossdock::te {

class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(xd_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  xd_status status() const noexcept { return status_; }

 private:
  xd_status status_;
};

namespace detail {

[[noreturn]] inline void refuse(const std::string& text) {
  throw Error(XD_ERROR_INVALID_ARGUMENT, text);
}

inline void require(bool good, const std::string& text) {
  if (!good) refuse(text);
}

/* Throws the error that a call into the library has returned. */
inline void check(const char* function, xd_status status) {
  if (status == XD_SUCCESS) return;
  throw Error(status,
              std::string(function) + ": " + xd_status_name(status) + ": " + xd_last_error());
}

}  // namespace detail
}  // namespace crossdock::te

#endif /* CROSSDOCK_COMPAT_TE_ERROR_H_ */
