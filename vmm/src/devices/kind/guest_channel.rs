//! The channel by which a guest governs VFs.

use virtio_devices::{ChannelCounter, CounterText, GuestChannel, MAX_LINE, MAX_MESSAGE};
use vm_api::channel::{CONTROL_PORT, EVENTS_PORT, MAX_REPLY, MAX_REQUEST};

use super::site::{Opened, Site};
use crate::devices::error::DeviceError;
use crate::devices::handle::Handle;

/// Two eventfds between the worker and the control thread, a doorbell, and seven MSI-X vectors.
pub(super) const OPEN_FILES: u64 = 10;
pub(super) const THREADS: u64 = 1;
pub(super) const COUNTERS: (&str, &[CounterText]) = ("guest_channel", ChannelCounter::TEXTS);

// The device keeps the limits of the protocol.
const _: () = assert!(MAX_LINE == MAX_REQUEST && MAX_MESSAGE == MAX_REPLY);

pub(super) fn open(site: &Site<'_>) -> Result<Opened, DeviceError> {
    let end = site.host.channel.clone().ok_or(DeviceError::NoChannel)?;
    let channel = GuestChannel::new(&site.plan.id, end, [CONTROL_PORT, EVENTS_PORT]);
    let counters = channel.counters();
    Ok((site.function(channel)?, Handle::plain(COUNTERS.0, move || counters.iter().collect())))
}
