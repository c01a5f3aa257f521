//! `ch-remote` against the real command, which need not run a guest for that.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what fails here is a failed test")]

mod cpus;
mod events;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests need one kernel of those that there are")]
mod files;
mod life;
mod metrics;
mod vmm;
