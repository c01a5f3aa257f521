//! Live migration: moves a running guest to another process.
//!
//! The order of a migration is in `source_thread/phases.rs` and `target_thread/phases.rs`.
//!
//! | file | what it is |
//! |---|---|
//! | `source_thread` | the source's thread |
//! | `target_thread` | the target's thread |
//! | `handle` | handle of the control thread to a migration thread |
//! | `commands` | commands of migration threads to the control thread, and its replies |
//! | `event_loop` | loop from events to actions, and deadlines of phases |
//! | `background_tasks` | background threads of a migration thread |
//! | `report` | progress, downtime, and the reason of a failure |
//! | `handover` | ownership of the guest: state machines of source and target |
//! | `precopy` | decision when to stop the guest |
//! | `control_channel` | channel for frames and documents (`offer`), over `transport` and optionally `tls` |
//! | `incoming` | frames from a connection |
//! | `loader` | guest memory that pages arrive for |
//! | `passed_memory` | memory and taps that a local target receives as descriptors, with `fd_passing` |
//! | `progress` | progress of a migration for clients |
//! | `wire` | frames of a migration, as bytes |
//! | `deadline` | waits for a peer with a deadline |
//! | `error` | errors of creating the target's VM |

mod background_tasks;
pub(crate) mod commands;
mod control_channel;
pub(crate) mod deadline;
pub mod error;
mod event_loop;
mod fd_passing;
mod handle;
pub mod handover;
pub mod incoming;
pub mod loader;
pub(crate) mod offer;
pub(crate) mod passed_memory;
pub mod precopy;
pub mod progress;
mod report;
pub(crate) mod source_thread;
pub(crate) mod target_thread;
pub(crate) mod tls;
pub(crate) mod transport;
pub mod wire;
