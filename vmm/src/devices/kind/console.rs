//! The virtio console.

use virtio_devices::{Console, ConsoleCounter, CounterText};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// The host side (a socket, its epoll, its client and an eventfd), a doorbell, and three MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 8;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("console", ConsoleCounter::TEXTS);

pub(super) fn open(site: &Site<'_>) -> Result<Opened, DeviceError> {
    let (end, window) = site.host.console.clone().ok_or(DeviceError::NoConsole)?;
    let console = Console::new(&site.plan.id, end, window);
    let counters = console.counters();
    Ok((site.function(console)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
