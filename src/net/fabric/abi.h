// The parts of libfabric's structs that this library uses, and where 1.17 has them. Headers of
// later versions have more in them, behind that; with headers that had moved something, functions
// that are looked up (library.cc) would fill other places than the ones that are read here.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <cstddef>

namespace xd::net {

static_assert(sizeof(void*) == 8 && sizeof(fi_context2) == 64 && sizeof(fi_cq_data_entry) == 40);

static_assert(offsetof(fi_info, caps) == 8 && offsetof(fi_info, mode) == 16);
static_assert(offsetof(fi_info, next) == 0 && offsetof(fi_info, addr_format) == 24 &&
              offsetof(fi_info, src_addrlen) == 32 && offsetof(fi_info, src_addr) == 48);
static_assert(offsetof(fi_info, tx_attr) == 72 && offsetof(fi_info, ep_attr) == 88);
static_assert(offsetof(fi_info, domain_attr) == 96 && offsetof(fi_info, fabric_attr) == 104);
static_assert(offsetof(fi_tx_attr, op_flags) == 16 && offsetof(fi_fabric_attr, prov_name) == 16);
static_assert(offsetof(fi_fabric_attr, name) == 8 && offsetof(fi_domain_attr, name) == 8);
static_assert(offsetof(fi_ep_attr, type) == 0 && offsetof(fi_ep_attr, max_msg_size) == 16);
static_assert(offsetof(fi_domain_attr, threading) == 16 &&
              offsetof(fi_domain_attr, data_progress) == 24 &&
              offsetof(fi_domain_attr, av_type) == 32 && offsetof(fi_domain_attr, mr_mode) == 36 &&
              offsetof(fi_domain_attr, mr_key_size) == 40 &&
              offsetof(fi_domain_attr, cq_data_size) == 48);

// An adapter.
static_assert(offsetof(fi_info, nic) == 112 && offsetof(fid_nic, device_attr) == 24 &&
              offsetof(fid_nic, bus_attr) == 32 && offsetof(fid_nic, link_attr) == 40);
static_assert(offsetof(fi_device_attr, name) == 0 && offsetof(fi_bus_attr, bus_type) == 0 &&
              offsetof(fi_bus_attr, attr) == 4 && sizeof(fi_pci_attr) == 6);
static_assert(offsetof(fi_link_attr, speed) == 16 && offsetof(fi_link_attr, state) == 24);

static_assert(offsetof(fi_av_attr, type) == 0 && offsetof(fi_cq_attr, size) == 0);
static_assert(offsetof(fi_cq_attr, format) == 16 && offsetof(fi_cq_attr, wait_obj) == 20);
static_assert(offsetof(fi_cq_err_entry, op_context) == 0 && offsetof(fi_cq_err_entry, err) == 56);

// Objects, and the tables of their functions.
static_assert(offsetof(fid, ops) == 16 && offsetof(fid_fabric, ops) == 24);
static_assert(offsetof(fid_domain, ops) == 24 && offsetof(fid_domain, mr) == 32);
static_assert(offsetof(fid_mr, mem_desc) == 24 && offsetof(fid_mr, key) == 32);
static_assert(offsetof(fid_av, ops) == 24 && offsetof(fid_cq, ops) == 24);
static_assert(offsetof(fid_ep, cm) == 32 && offsetof(fid_ep, rma) == 48);
static_assert(offsetof(fi_ops, close) == 8 && offsetof(fi_ops, bind) == 16 &&
              offsetof(fi_ops, control) == 24);
static_assert(offsetof(fi_ops_fabric, domain) == 8 && offsetof(fi_ops_fabric, trywait) == 40);
static_assert(offsetof(fi_ops_domain, av_open) == 8 && offsetof(fi_ops_domain, cq_open) == 16 &&
              offsetof(fi_ops_domain, endpoint) == 24);
static_assert(offsetof(fi_ops_mr, reg) == 8 && offsetof(fi_ops_cm, getname) == 16);
static_assert(offsetof(fi_ops_av, insert) == 8 && offsetof(fi_ops_av, lookup) == 40 &&
              offsetof(fi_ops_av, straddr) == 48);
static_assert(offsetof(fi_ops_cq, read) == 8 && offsetof(fi_ops_cq, readerr) == 24);
static_assert(offsetof(fi_ops_rma, writedata) == 64);

}  // namespace xd::net
