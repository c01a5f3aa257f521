//! A channel between a program in the guest and the host: a virtio console with two named ports (`virtio 1.4 §5.3`,
//! `VIRTIO_CONSOLE_F_MULTIPORT`).
//!
//! The guest writes requests to port 0, one per line, and reads a reply for each. On port 1 it reads notices. One
//! worker runs all queues. It splits lines and keeps the limits; the lines themselves are for the host, which takes and
//! answers them through [`ChannelEnd`].

mod control;
mod counters;
mod end;
mod exchange;
mod lines;
mod outbox;
mod ports;
mod saved;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use crate::device::RING_FEATURES;
use crate::device::config::{ConfigField, Rule, read};
use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::transport::features::has;
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
use control::{F_MULTIPORT, PORTS};
pub use counters::{ChannelCounter, ChannelCounters};
pub use end::{ChannelEnd, ChannelLine};
pub use exchange::MAX_WAITING_NOTICES;
pub use lines::MAX_LINE;
pub use outbox::MAX_MESSAGE;
use ports::Ports;

/// The device configuration (`virtio 1.4 §5.3.4`), without the field of a feature that is not offered.
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("cols", 0, 2, Rule::Same).of(F_SIZE),
    ConfigField::new("rows", 2, 2, Rule::Same).of(F_SIZE),
    ConfigField::new("max_nr_ports", 4, 4, Rule::Same).of(F_MULTIPORT),
];
/// The configuration has the console's size, which this device does not offer.
const F_SIZE: u32 = 0;
/// Simple communication controller, other, as a console's.
const CLASS: [u8; 3] = [0x07, 0x80, 0x00];
/// Receive and transmit queues of port 0, of control messages, and of port 1 (`virtio 1.4 §5.3.2`).
const QUEUE_SIZES: &[u16] = &[64; 6];

/// A channel's device. It outlives resets of the device and reboots of the guest.
pub struct GuestChannel {
    end: Arc<ChannelEnd>,
    names: [&'static str; 2],
    counted: Counted<ChannelCounters>,
}

impl GuestChannel {
    /// Creates a device called `id` for `end`. Its ports have the names `names`, which are short.
    pub fn new(id: &str, end: Arc<ChannelEnd>, names: [&'static str; 2]) -> Self {
        Self { end, names, counted: Counted::new(id) }
    }

    /// Counters of the channel.
    pub fn counters(&self) -> Arc<ChannelCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for GuestChannel {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_CONSOLE as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        RING_FEATURES | 1 << F_MULTIPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    /// No size, and the number of ports (`virtio 1.4 §5.3.4`, `struct virtio_console_config`).
    fn config_read(&self, offset: u64, data: &mut [u8]) {
        read(&[0, 0, 0, 0, PORTS, 0, 0, 0], offset, data);
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let ports = Ports::new(Arc::clone(&self.end), self.names, has(start.features, F_MULTIPORT));
        queue_worker::start(ports, WorkerKind::Queue, self.counted.id(), start, self.counted.counters())
    }

    fn reset(&mut self) {
        self.counted.was_reset();
        self.end.reset();
    }

    fn save(&self) -> DeviceSpecific {
        match self.end.save() {
            state if state == Default::default() => DeviceSpecific::PowerOn,
            state => DeviceSpecific::Channel(Box::new(state)),
        }
    }

    fn restore(&mut self, state: &DeviceSpecific, started: Option<u64>) -> Result<(), StateError> {
        match state {
            DeviceSpecific::PowerOn => Ok(()),
            DeviceSpecific::Channel(state) if started.is_some_and(|features| has(features, F_MULTIPORT)) => {
                self.end.restore(state)
            }
            DeviceSpecific::Channel(_) => Err(StateError::Value("a channel")),
            _ => Err(StateError::Shape("kinds of device")),
        }
    }
}
