//! Tests of the REST API of the real command, as clients use it. Where a guest is needed, it consists of a few
//! instructions and runs on the machine's own KVM.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod client;
mod clients;
mod code;
mod confined;
mod disks;
mod driven;
mod faults;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests use only one of the kernels")]
mod files;
mod floods;
mod landlock;
mod limits;
mod memory;
mod mute_peer;
mod on_off;
mod pmem;
mod policy;
mod privileges;
mod readme;
mod refused;
mod registry_client;
mod rootless;
mod switch;
mod tap;
mod tpm;
mod vmm;
mod vsock;
