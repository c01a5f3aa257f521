//! The REST API of the real command, as its clients meet it. What needs a guest has one of a few instructions, under the
//! machine's own KVM.

#![expect(clippy::unwrap_used, reason = "what fails here is a failed test")]

mod client;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests need one kernel of those that there are")]
mod files;
mod limits;
mod readme;
mod refused;
mod registry_client;
mod tap;
mod vmm;
