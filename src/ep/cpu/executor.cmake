list(APPEND xd_executors cpu)

xd_layer(xd_ep_cpu
  SOURCES
    ep/cpu/choices.cc
    ep/cpu/combine.cc
    ep/cpu/combine_bwd.cc
    ep/cpu/cpu_group.cc
    ep/cpu/dispatch.cc
    ep/cpu/far_side.cc
    ep/cpu/far_stream.cc
    ep/cpu/far_sums.cc
    ep/cpu/ll_combine.cc
    ep/cpu/ll_dispatch.cc
    ep/cpu/ll_far.cc
    ep/cpu/ll_group.cc
    ep/cpu/local.cc
    ep/cpu/lockstep.cc
    ep/cpu/numbering.cc
    ep/cpu/prepare.cc
    ep/cpu/rows.cc
    ep/cpu/strided.cc
    ep/cpu/token_terms.cc
    ep/cpu/transfer.cc
  DEPENDS
    xd_ep
    hwy::hwy
)
# Sums have one defined order and rounding: a product and the sum after it are not fused.
target_compile_options(xd_ep_cpu PRIVATE -ffp-contract=off)
