//! An emulated X550, driven by ixgbe and ixgbevf of Debian's generic kernels.

mod x550_cni;
mod x550_dpdk;
mod x550_driver;
mod x550_moves;
mod x550_node;
mod x550_policy;
mod x550_rules;
mod x550_switch;
mod x550_traffic;
mod x550_vfs;
