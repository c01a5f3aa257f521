//! `ch-remote` with the real command. Most tests need no guest.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod balloon;
mod cpus;
mod devices;
mod events;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests use only one of the kernels")]
mod files;
mod life;
mod memory;
mod metrics;
mod vmm;
