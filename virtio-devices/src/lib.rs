//! virtio-pci functions and the devices behind them.
//!
//! This crate knows guest memory, file descriptors and virtqueues. It does not know KVM, HTTP or ACPI.

mod device;
mod host;
mod interrupt;

pub use device::{Memory, SharedQueue, Start, VirtioDevice, Worker};
pub use host::{Doorbell, Message, VirtioPci};
pub use interrupt::{Interrupts, NO_VECTOR};
