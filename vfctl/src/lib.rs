//! The guest's side of the channel by which a guest governs its VFs: requests ([`Channel`]), notices ([`Events`]), and
//! the functions that both name ([`function`]).
//!
//! The VMM provides the channel as two ports of a virtio console (`--net guest_control=`). [`vm_api::channel`] has the
//! requests and replies. The program `vfctl` and the CNI plugin use this library.

mod channel;
mod error;
mod events;
pub mod function;
mod lines;
pub mod lock;
mod port;
mod roots;

pub use channel::Channel;
pub use error::Error;
pub use events::Events;
pub use roots::Roots;
