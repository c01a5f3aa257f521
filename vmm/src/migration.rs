//! Live migration: moves a running guest to another process.
//!
//! | file | what it is |
//! |---|---|
//! | `wire` | frames of a migration, as bytes |
//! | `sending` | the source's thread, with `pages_out` |
//! | `receiving` | the target's thread, with `listening`, `preparer` and `pages_in` |
//! | `link` | control channel for frames and documents (`offer`), over `transport` and optionally `tls` |
//! | `deadline` | waits for a peer with a deadline |
//! | `conducting` | the control thread's handle to a migration thread |
//! | `course` | code that both migration threads share |
//! | `errands` | background threads of a migration thread |
//! | `passed` | memory and taps that a local target receives as descriptors, with `passing` |
//! | `orders` | messages between a migration thread and the control thread |
//! | `incoming` | frames from a connection |
//! | `loader` | guest memory that pages arrive for |
//! | `handover` | ownership of the guest: state machines of source and target |
//! | `precopy` | decision when to stop the guest |
//! | `progress` | progress of a migration |
//! | `error` | errors of creating the target's VM |

pub(crate) mod conducting;
mod course;
pub(crate) mod deadline;
mod empty_files;
mod errands;
pub mod error;
pub mod handover;
pub mod incoming;
mod link;
pub(crate) mod listening;
pub mod loader;
pub(crate) mod offer;
pub(crate) mod orders;
mod pages_in;
pub(crate) mod pages_out;
pub(crate) mod passed;
mod passing;
pub mod precopy;
pub(crate) mod preparer;
pub mod progress;
pub(crate) mod receiving;
pub(crate) mod sending;
pub(crate) mod tls;
pub(crate) mod transport;
pub mod wire;
