//! VFs in a guest: their appearance, use, policies and drivers.

mod drivers;
mod guest_control;
mod guest_control_cni;
mod guest_control_node;
mod interfaces;
mod lspci;
mod namespaces;
mod nested;
mod policy;
mod sriov;
