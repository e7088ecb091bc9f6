list(APPEND xd_device_kinds cpu)
list(APPEND xd_device_kind_sources comm/cpu/device_kind.cc)
