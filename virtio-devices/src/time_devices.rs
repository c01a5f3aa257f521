//! Devices that keep a guest's time or watch it.

pub(crate) mod rtc;
pub(crate) mod watchdog;
