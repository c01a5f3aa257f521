//! The virtio-pci transport: feature negotiation, device status and queue configuration.
//!
//! A pure state machine: its registers are its only state. It starts no thread, touches no guest memory and does no
//! I/O, except that a vector gets an eventfd when the driver first maps something to it.

pub(crate) mod features;
pub(crate) mod interrupt;
pub(crate) mod lost_interrupts;
mod register;
mod state;
mod trace;

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::bindings::virtio_config::{
    VIRTIO_F_ADMIN_VQ, VIRTIO_F_NOTIF_CONFIG_DATA, VIRTIO_F_NOTIFICATION_DATA, VIRTIO_F_RING_PACKED,
    VIRTIO_F_RING_RESET, VIRTIO_F_SR_IOV, VIRTIO_F_VERSION_1,
};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use crate::transport::features::has;
use crate::{FeatureRequirement, Interrupts, SharedQueue};
pub(crate) use register::{Area, Half, Register};

bitflags::bitflags! {
    /// The device status (`virtio 1.4 §2.1`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Status: u8 {
        /// The driver has noticed the device.
        const ACKNOWLEDGE = 1;
        /// The driver can drive the device.
        const DRIVER = 2;
        /// The driver is ready: the queues run.
        const DRIVER_OK = 4;
        /// The device has accepted the driver's features.
        const FEATURES_OK = 8;
        /// The device has met an error that only a reset clears. Set by the device, not by the driver.
        const DEVICE_NEEDS_RESET = 64;
        /// The driver has given up on the device.
        const FAILED = 128;
    }
}

/// Features that devices may not offer: the transport does not support them, or they are the PF's (SR-IOV).
const NOT_THE_DEVICES: u64 = 1 << VIRTIO_F_RING_PACKED
    | 1 << VIRTIO_F_SR_IOV
    | 1 << VIRTIO_F_NOTIFICATION_DATA
    | 1 << VIRTIO_F_NOTIF_CONFIG_DATA
    | 1 << VIRTIO_F_RING_RESET
    | 1 << VIRTIO_F_ADMIN_VQ;

/// Effect of a write beyond the register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// No change.
    None,
    /// The set of eventfds that can signal.
    Vectors,
    /// The device status: queues may have to start or stop.
    Status,
    /// The driver reset the device: the transport is in its reset state already.
    Reset,
}

/// Reason why a device's queues are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The size is not possible for a split virtqueue (`virtio 1.4 §2.7`).
    #[error("queue {queue}: a size of {size} is not a power of two from 1 to 32768")]
    Size {
        /// The queue.
        queue: usize,
        /// The requested size.
        size: u16,
    },
    /// More queues than there are queue numbers.
    #[error("{0} queues are more than the 65535 that a device can have")]
    Count(usize),
}

/// The registers of one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct QueueRegisters {
    max_size: u16,
    size: u16,
    enabled: bool,
    descriptor: u64,
    driver: u64,
    device: u64,
}

impl QueueRegisters {
    const fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, enabled: false, descriptor: 0, driver: 0, device: 0 }
    }

    fn address(&self, area: Area) -> u64 {
        match area {
            Area::Descriptor => self.descriptor,
            Area::Driver => self.driver,
            Area::Device => self.device,
        }
    }

    fn address_mut(&mut self, area: Area) -> &mut u64 {
        match area {
            Area::Descriptor => &mut self.descriptor,
            Area::Driver => &mut self.driver,
            Area::Device => &mut self.device,
        }
    }

    /// The queue as a worker runs it; `None` if an address is not aligned (`virtio 1.4 §2.7`).
    fn queue(&self, event_idx: bool) -> Option<Queue> {
        let mut queue = Queue::new(self.max_size).ok()?;
        queue.try_set_size(self.size).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptor)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.driver)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.device)).ok()?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        Some(queue)
    }
}

/// The common configuration of one function.
#[derive(Debug)]
pub(crate) struct Transport {
    offered: u64,
    /// Features that a driver must accept.
    required: u64,
    /// See [`Self::requiring`].
    requirements: &'static [FeatureRequirement],
    vectors: u16,
    interrupts: Arc<Interrupts>,
    queues: Box<[QueueRegisters]>,
    /// The driver's part of the device status. The device's own bit is in `interrupts`, where workers can set it.
    status: Status,
    device_feature_select: u32,
    driver_feature_select: u32,
    /// Four words, as drivers may select; the device has no feature above bit 63.
    driver_features: u128,
    queue_select: u16,
}

impl Transport {
    /// Creates the reset state. `features` are the device's, to which VERSION_1 is added, and SR_IOV for a PF;
    /// `queue_sizes` are the largest size of each queue, `vectors` the number of MSI-X vectors.
    ///
    /// # Errors
    ///
    /// Fails if a queue size is invalid, or there are too many queues.
    pub(crate) fn new(features: u64, sr_iov: bool, queue_sizes: &[u16], vectors: u16) -> Result<Self, QueueError> {
        let count = u16::try_from(queue_sizes.len()).map_err(|_| QueueError::Count(queue_sizes.len()))?;
        if let Some((queue, &size)) = queue_sizes.iter().enumerate().find(|(_, size)| Queue::new(**size).is_err()) {
            return Err(QueueError::Size { queue, size });
        }
        Ok(Self {
            offered: features & !NOT_THE_DEVICES | 1 << VIRTIO_F_VERSION_1 | u64::from(sr_iov) << VIRTIO_F_SR_IOV,
            required: 0,
            requirements: &[],
            vectors,
            interrupts: Arc::new(Interrupts::new(count, vectors)),
            queues: queue_sizes.iter().map(|size| QueueRegisters::new(*size)).collect(),
            status: Status::empty(),
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            queue_select: 0,
        })
    }

    /// Makes the transport refuse a feature whose prerequisite is missing, if that is enforced (`virtio 1.4 §2.2.1`,
    /// `§2.2.2`).
    pub(crate) fn requiring(self, requirements: &'static [FeatureRequirement]) -> Self {
        Self { requirements, ..self }
    }

    /// Offers a feature that drivers must accept.
    pub(crate) fn require(&mut self, bit: u32) {
        self.offered |= 1 << bit;
        self.required |= 1 << bit;
    }

    /// Offers these features of the device from now on. Features that a driver has accepted stay.
    pub(crate) fn offer(&mut self, features: u64) {
        let own = self.required | self.offered & 1 << VIRTIO_F_SR_IOV;
        self.offered = features & !NOT_THE_DEVICES | 1 << VIRTIO_F_VERSION_1 | own;
    }

    /// The negotiated features, if negotiation is complete.
    pub(crate) fn agreed(&self) -> Option<u64> {
        self.status.contains(Status::FEATURES_OK).then(|| self.accepted())
    }

    /// Returns to the power-on state.
    pub(crate) fn reset(&mut self) {
        let Self {
            offered: _,
            required: _,
            requirements: _,
            vectors,
            interrupts,
            queues,
            status,
            device_feature_select,
            driver_feature_select,
            driver_features,
            queue_select,
        } = self;
        match Arc::get_mut(interrupts) {
            Some(interrupts) => interrupts.reset(),
            // Workers that are still ending signal the old interrupts, which no longer reach the driver.
            None => *interrupts = Arc::new(Interrupts::new(queue_count(queues), *vectors).observed_as(interrupts)),
        }
        for queue in queues {
            *queue = QueueRegisters::new(queue.max_size);
        }
        *status = Status::empty();
        *device_feature_select = 0;
        *driver_feature_select = 0;
        *driver_features = 0;
        *queue_select = 0;
    }

    /// The device status.
    pub(crate) fn status(&self) -> Status {
        let mut status = self.status;
        status.set(Status::DEVICE_NEEDS_RESET, self.interrupts.needs_reset());
        status
    }

    /// True if the driver has set DRIVER_OK, and neither FAILED nor DEVICE_NEEDS_RESET is set.
    pub(crate) fn ready(&self) -> bool {
        self.status() & (Status::DRIVER_OK | Status::DEVICE_NEEDS_RESET | Status::FAILED) == Status::DRIVER_OK
    }

    /// The negotiated features: 0 before FEATURES_OK.
    pub(crate) fn features(&self) -> u64 {
        if self.status.contains(Status::FEATURES_OK) { self.accepted() } else { 0 }
    }

    fn accepted(&self) -> u64 {
        self.offered & lower(self.driver_features)
    }

    /// Interrupts for the function's workers, until the next reset.
    pub(crate) fn interrupts(&self) -> &Arc<Interrupts> {
        &self.interrupts
    }

    /// The queues that the driver enabled, in their state at DRIVER_OK: nothing is consumed yet.
    pub(crate) fn queues(&self) -> Vec<(u16, SharedQueue)> {
        let event_idx = self.features() & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let enabled = (0..).zip(&self.queues).filter(|(_, registers)| registers.enabled);
        enabled.filter_map(|(index, queue)| Some((index, Arc::new(Mutex::new(queue.queue(event_idx)?))))).collect()
    }

    /// Reads `data.len()` bytes at `offset` of the common configuration. Accesses outside of a register, or not of its
    /// width, read 0. `config_generation` is the device's.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8], config_generation: u8) {
        data.fill(0);
        if let Some(register) = Register::decode(offset, data.len()) {
            let value = self.read_register(register, config_generation).to_le_bytes();
            data.iter_mut().zip(value).for_each(|(to, from)| *to = from);
        }
    }

    fn read_register(&self, register: Register, config_generation: u8) -> u32 {
        let queue = self.queues.get(usize::from(self.queue_select));
        match register {
            Register::DeviceFeatureSelect => self.device_feature_select,
            Register::DeviceFeature => word(self.offered.into(), self.device_feature_select),
            Register::DriverFeatureSelect => self.driver_feature_select,
            Register::DriverFeature => word(self.driver_features, self.driver_feature_select),
            Register::ConfigMsixVector => self.interrupts.config_vector().into(),
            Register::NumQueues => queue_count(&self.queues).into(),
            Register::DeviceStatus => self.status().bits().into(),
            Register::ConfigGeneration => config_generation.into(),
            Register::QueueSelect => self.queue_select.into(),
            // A queue that does not exist has the size 0 (`virtio 1.4 §4.1.4.3.1`).
            Register::QueueSize => queue.map_or(0, |queue| queue.size).into(),
            Register::QueueMsixVector => self.interrupts.queue_vector(self.queue_select).into(),
            Register::QueueEnable => queue.is_some_and(|queue| queue.enabled).into(),
            Register::QueueNotifyOff => queue.map_or(0, |_| self.queue_select).into(),
            Register::QueueAddress(area, half) => queue.map_or(0, |queue| half.of(queue.address(area))),
            // These belong to features that are not offered.
            Register::QueueNotifConfigData
            | Register::QueueReset
            | Register::AdminQueueIndex
            | Register::AdminQueueNum => 0,
        }
    }

    /// Writes `data` at `offset` of the common configuration. Ignores accesses outside of a register, not of its width,
    /// to read-only registers, or not allowed in this state.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Change {
        let Some(register) = Register::decode(offset, data.len()) else { return Change::None };
        match *data {
            [byte] if register == Register::DeviceStatus => self.write_status(byte),
            [low, high] => self.write_16(register, u16::from_le_bytes([low, high])),
            [a, b, c, d] => {
                self.write_32(register, u32::from_le_bytes([a, b, c, d]));
                Change::None
            }
            _ => Change::None,
        }
    }

    fn write_status(&mut self, value: u8) -> Change {
        if value == 0 {
            self.reset();
            return Change::Reset;
        }
        // The driver may only add bits (`virtio 1.4 §2.1.1`).
        let mut status = self.status | (Status::from_bits_truncate(value) - Status::DEVICE_NEEDS_RESET);
        if !self.status.contains(Status::FEATURES_OK) && !self.acceptable() {
            status -= Status::FEATURES_OK;
        }
        if !status.contains(Status::FEATURES_OK) {
            status -= Status::DRIVER_OK;
        }
        let changed = status != self.status;
        self.status = status;
        if changed { Change::Status } else { Change::None }
    }

    /// True if the driver chose only offered features, with their prerequisites, and not the legacy interface (`virtio
    /// 1.4 §6.1`, `§6.2`).
    fn acceptable(&self) -> bool {
        let chosen = self.accepted();
        let complete = chosen & self.required == self.required;
        let complete = complete && self.unmet(true).next().is_none();
        self.driver_features & !u128::from(self.offered) == 0 && has(chosen, VIRTIO_F_VERSION_1) && complete
    }

    /// The requirements among the chosen features that are not met, of those that are enforced or of the others.
    fn unmet(&self, enforced: bool) -> impl Iterator<Item = &'static FeatureRequirement> {
        let chosen = self.accepted();
        self.requirements.iter().filter(move |one| one.enforced == enforced && !one.is_met(chosen))
    }

    fn write_32(&mut self, register: Register, value: u32) {
        match register {
            Register::DeviceFeatureSelect => self.device_feature_select = value,
            Register::DriverFeatureSelect => self.driver_feature_select = value,
            Register::DriverFeature if !self.status.contains(Status::FEATURES_OK) => {
                if let Some(shift) = shift(self.driver_feature_select) {
                    self.driver_features &= !(u128::from(u32::MAX) << shift);
                    self.driver_features |= u128::from(value) << shift;
                }
            }
            Register::QueueAddress(area, half) => {
                if let Some(queue) = self.configurable_queue() {
                    let address = queue.address_mut(area);
                    *address = half.replace(*address, value);
                }
            }
            _ => {}
        }
    }

    fn write_16(&mut self, register: Register, value: u16) -> Change {
        match register {
            Register::ConfigMsixVector => {
                self.interrupts.set_config_vector(value);
                return Change::Vectors;
            }
            Register::QueueMsixVector => {
                self.interrupts.set_queue_vector(self.queue_select, value);
                return Change::Vectors;
            }
            Register::QueueSelect => self.queue_select = value,
            Register::QueueSize => {
                if let Some(queue) = self.configurable_queue()
                    && value.is_power_of_two()
                    && value <= queue.max_size
                {
                    queue.size = value;
                }
            }
            Register::QueueEnable if value == 1 => {
                if let Some(queue) = self.configurable_queue() {
                    // An invalid queue is not enabled, as the driver can read back.
                    queue.enabled = queue.queue(false).is_some();
                }
            }
            _ => {}
        }
        Change::None
    }

    /// The selected queue, if the driver may configure it: before enabling it, and before DRIVER_OK (`virtio 1.4
    /// §3.1.1`, `§4.1.4.3.2`).
    fn configurable_queue(&mut self) -> Option<&mut QueueRegisters> {
        if self.status.contains(Status::DRIVER_OK) {
            return None;
        }
        self.queues.get_mut(usize::from(self.queue_select)).filter(|queue| !queue.enabled)
    }
}

/// The number of queues; the constructor has checked that it fits.
fn queue_count(queues: &[QueueRegisters]) -> u16 {
    u16::try_from(queues.len()).unwrap_or(u16::MAX)
}

/// The position of feature word `select`; `None` for an undefined word.
fn shift(select: u32) -> Option<u32> {
    (select < 4).then(|| select * 32)
}

fn word(features: u128, select: u32) -> u32 {
    shift(select).map_or(0, |shift| Half::Low.of(lower(features >> shift)))
}

fn lower(features: u128) -> u64 {
    u64::try_from(features & u128::from(u64::MAX)).unwrap_or(0)
}

#[cfg(test)]
mod tests;
