//! The command `cloud-hypervisor`.

fn main() {}
