//! Live migration: a guest that leaves this process while it runs, and goes on in another.
//!
//! | file | what it is |
//! |---|---|
//! | `wire` | the frames of a live migration, as bytes |
//! | `sending` | the source's thread, with `pages_out` |
//! | `receiving` | the target's thread, with `listening`, `preparer` and `pages_in` |
//! | `link` | what both sides say to each other, such as the `offer`; `transport` carries it, by `tls` if told |
//! | `deadline` | waits for a peer that end in time |
//! | `conducting` | such a thread, as the control thread keeps it |
//! | `course` | what both of them do alike |
//! | `errands` | work that these threads have others do |
//! | `passed` | what a target on the same host gets instead of copies, by `passing` |
//! | `orders` | what these threads and the control thread say to each other |
//! | `incoming` | its frames as they arrive |
//! | `loader` | guest memory, as pages arrive for it |
//! | `handover` | who may run the guest: both sides of a live migration, from events to actions |
//! | `precopy` | when to stop the guest |
//! | `progress` | how far a live migration is |
//! | `error` | why the target has no VM for its guest |

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
