# Read by ctest before it runs tests of a build with sanitizers: what all their programs are told.
# Values of the caller come last, and count.
set(leaks "suppressions='${CMAKE_CURRENT_LIST_DIR}/leaks.txt':print_suppressions=0")
set(ENV{LSAN_OPTIONS} "${leaks}:$ENV{LSAN_OPTIONS}")
set(ENV{UBSAN_OPTIONS} "print_stacktrace=1:$ENV{UBSAN_OPTIONS}")
