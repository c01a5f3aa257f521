//! Where a NIC's frames come from and go to.

mod tap;

pub use tap::{Offloads, Tap, TapError, TapQueue, TapSpec};
