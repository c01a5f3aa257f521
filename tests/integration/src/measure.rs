//! Counts and traces of what the VMM and KVM do, from the kernel.

pub(crate) mod doorbell_exits;
pub(crate) mod kernel_fs;
pub(crate) mod kvm_statistics;
pub(crate) mod kvm_trace;
pub(crate) mod port_trace;
pub(crate) mod sample;
pub(crate) mod usage;
