//! virtio-mem: memory that the host gives to a running guest and takes back, in blocks (`virtio 1.4 §5.15`).
//!
//! The host requests a size; the driver plugs and unplugs blocks to reach it. All of the memory is mapped in this
//! process from the start, and sent to backends of other processes once. vCPUs and devices of this process reach only
//! plugged blocks: plugging a block gives it a KVM memory slot, and unplugging one removes the slot and returns its
//! pages to the host. Backends with direct access to all of the memory may write elsewhere; such pages are freed from
//! time to time ([`MemRegion::reclaim`]).

mod blocks;
mod counters;
mod region;
mod requests;
mod slots;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod steps;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_ids::VIRTIO_ID_MEM;

use crate::device::RING_FEATURES;
use crate::device::config::{ConfigField, Rule};
use crate::device::counters::Counted;
use crate::device::queue_worker;
use crate::device::worker::WorkerKind;
use crate::{DeviceSpecific, Start, StateError, VirtioDevice, Worker};
pub use counters::{MemCounter, MemCounters};
pub use region::MemRegion;
use requests::Requests;
pub use slots::MemSlots;

/// The device configuration (`virtio 1.4 §5.15.4`).
pub(crate) const FIELDS: &[ConfigField] = &[
    ConfigField::new("block_size", 0, 8, Rule::Same),
    ConfigField::new("node_id", 8, 2, Rule::Same).of(F_ACPI_PXM),
    ConfigField::reserved(10, 6),
    ConfigField::new("addr", 16, 8, Rule::Same),
    ConfigField::new("region_size", 24, 8, Rule::Same),
    ConfigField::new("usable_region_size", 32, 8, Rule::Same),
    ConfigField::new("plugged_size", 40, 8, Rule::Saved),
    ConfigField::new("requested_size", 48, 8, Rule::Announced),
];
/// The size of the only queue.
const QUEUE_SIZES: &[u16] = &[128];
/// The configuration has the proximity domain of the memory (`VIRTIO_MEM_F_ACPI_PXM`).
const F_ACPI_PXM: u32 = 0;
/// Unplugged blocks must not be accessed (`VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE`). A driver without the feature may read
/// them, and reads ones.
const F_UNPLUGGED_INACCESSIBLE: u32 = 1;

/// Description of a memory device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemSpec {
    /// Id, also the name of its thread.
    pub id: String,
    /// The NUMA node of its memory, as in the ACPI tables, if there are nodes.
    pub node: Option<u16>,
}

/// A virtio memory device.
pub struct Mem {
    node: Option<u16>,
    region: Arc<MemRegion>,
    counted: Counted<MemCounters>,
}

impl Mem {
    /// Creates a device with the memory `region`, which is part of guest memory.
    pub fn new(MemSpec { id, node }: MemSpec, region: Arc<MemRegion>) -> Self {
        Self { node, region, counted: Counted::new(&id) }
    }

    /// Id of the device.
    pub fn id(&self) -> &str {
        self.counted.id()
    }

    /// Counters of the device.
    pub fn counters(&self) -> Arc<MemCounters> {
        Arc::clone(self.counted.counters())
    }
}

impl VirtioDevice for Mem {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_MEM as u16
    }

    fn features(&self) -> u64 {
        RING_FEATURES | 1 << F_UNPLUGGED_INACCESSIBLE | u64::from(self.node.is_some()) << F_ACPI_PXM
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        FIELDS
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        self.region.read(self.node.unwrap_or(0), offset, data);
    }

    fn config_generation(&self) -> u8 {
        self.region.generation()
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let (requests, interrupts) = (Requests(Arc::clone(&self.region)), Arc::clone(&start.interrupts));
        let workers =
            queue_worker::start(requests, WorkerKind::Mem, self.counted.id(), start, self.counted.counters())?;
        self.region.signal_to((!workers.is_empty()).then_some(interrupts));
        Ok(workers)
    }

    /// Leaves plugged blocks as they are: only a reset of the machine unplugs them (`virtio 1.4 §5.15.5`).
    fn reset(&mut self) {
        self.counted.was_reset();
        self.region.signal_to(None);
    }

    fn save(&self) -> DeviceSpecific {
        self.region.save().map_or(DeviceSpecific::PowerOn, DeviceSpecific::Config)
    }

    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        match state {
            DeviceSpecific::PowerOn => {
                self.region.unplug_all();
                Ok(())
            }
            DeviceSpecific::Config(bits) if self.region.restore(bits) => Ok(()),
            DeviceSpecific::Config(_) => Err(StateError::Shape("numbers of memory blocks")),
            _ => Err(StateError::Shape("kinds of device")),
        }
    }
}
