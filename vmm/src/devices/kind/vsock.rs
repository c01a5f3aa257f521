//! The socket device.

use virtio_devices::{CounterText, Vsock, VsockCounter, VsockSpec};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;
use crate::landlock::Rule;

/// A socket, a poll set and a doorbell, and four MSI-X vectors. A connection without a free file is refused.
pub(super) const OPEN_FILES: u64 = 7;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("vsock", VsockCounter::TEXTS);

pub(super) fn open(spec: &VsockSpec, site: &Site<'_>) -> Result<Opened, DeviceError> {
    let vsock = Vsock::open_with(spec.clone(), &site.host.sockets).map_err(|error| site.failed(error.kind(), error))?;
    let (counters, socket) = (vsock.counters(), Some(vsock.socket()));
    let read = Box::new(move || counters.iter().collect());
    Ok((site.function(vsock)?, Handle::Plain { kind: COUNTERS.0, read, lock: None, socket }))
}

/// The folder of the socket.
pub(super) fn files(spec: &VsockSpec, option: &str) -> Vec<Rule> {
    vec![Rule::of_socket(option, &spec.socket)]
}
