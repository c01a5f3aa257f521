//! The function through which a driver controls the IOMMU.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ids::VIRTIO_ID_IOMMU;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::config::{self, BYPASS};
use super::counters::IommuCounters;
use super::events::EventWorker;
use super::requests::RequestQueue;
use super::unit::Iommu;
use crate::device::config::{ConfigField, read};
use crate::device::counters::Counted;
use crate::device::worker::{WorkerKind, spawn, thread_name};
use crate::{DeviceSpecific, SharedQueue, Start, StateError, VirtioDevice, Worker};

/// A base system peripheral, IOMMU.
const CLASS: [u8; 3] = [0x08, 0x06, 0x00];
/// The request queue, and the event queue.
const REQUESTS: u16 = 0;
const EVENTS: u16 = 1;
const QUEUE_SIZES: &[u16] = &[256, 64];

/// Feature bits (`virtio 1.4 §5.13.3`).
const INPUT_RANGE: u32 = 0;
const DOMAIN_RANGE: u32 = 1;
const MAP_UNMAP: u32 = 2;
const PROBE: u32 = 4;
const MMIO: u32 = 5;
const BYPASS_CONFIG: u32 = 6;
/// No event index: each request rings the doorbell.
const FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_RING_F_INDIRECT_DESC
    | 1 << INPUT_RANGE
    | 1 << DOMAIN_RANGE
    | 1 << MAP_UNMAP
    | 1 << PROBE
    | 1 << MMIO
    | 1 << BYPASS_CONFIG;

/// The virtio device of an [`Iommu`].
pub struct IommuDevice {
    iommu: Arc<Iommu>,
    /// The request queue, from a start to the next reset.
    requests: Option<RequestQueue>,
    counted: Counted<IommuCounters>,
}

impl IommuDevice {
    /// The device called `id` of `iommu`.
    pub fn new(id: &str, iommu: Arc<Iommu>) -> Self {
        Self { counted: Counted::with(id, iommu.counters()), iommu, requests: None }
    }

    /// Starts the event worker, if the driver enabled the event queue.
    fn start_events(&self, start: &Start, queue: SharedQueue) -> io::Result<Worker> {
        let kick = Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
        let stop = Arc::new(AtomicBool::new(false));
        let worker = EventWorker {
            index: EVENTS,
            queue,
            memory: start.memory.clone(),
            interrupts: Arc::clone(&start.interrupts),
            common: Arc::clone(&self.iommu.common),
            kick: Arc::clone(&kick),
            stop: Arc::clone(&stop),
        };
        let thread = spawn(WorkerKind::Queue, thread_name(self.counted.id(), "q", EVENTS), move || worker.run())?;
        self.iommu.common.faults.tell(Some(Arc::clone(&kick)));
        Ok(Worker::new([EVENTS], kick, stop, thread))
    }
}

impl VirtioDevice for IommuDevice {
    fn device_type(&self) -> u16 {
        VIRTIO_ID_IOMMU as u16
    }

    fn class(&self) -> [u8; 3] {
        CLASS
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        QUEUE_SIZES
    }

    fn config_fields(&self) -> &'static [ConfigField] {
        config::FIELDS
    }

    fn config_read(&self, offset: u64, data: &mut [u8]) {
        read(&config::bytes(self.iommu.last_address(), self.iommu.bypass()), offset, data);
    }

    fn config_write(&mut self, offset: u64, data: &[u8]) {
        // Other values are reserved.
        if let (BYPASS, [bypass @ (0 | 1)]) = (offset, data) {
            self.iommu.set_bypass(*bypass == 1);
        }
    }

    fn start(&mut self, start: Start) -> io::Result<Vec<Worker>> {
        let queue = |index| start.queues.iter().find(|(other, _)| *other == index).map(|(_, queue)| Arc::clone(queue));
        let events = queue(EVENTS).map(|queue| self.start_events(&start, queue)).transpose()?;
        self.requests = queue(REQUESTS).map(|queue| RequestQueue {
            index: REQUESTS,
            queue,
            memory: start.memory.clone(),
            interrupts: Arc::clone(&start.interrupts),
            iommu: Arc::clone(&self.iommu),
        });
        // Requests made while the queue did not run have rung their doorbell already.
        self.doorbell_rung(REQUESTS);
        Ok(events.into_iter().collect())
    }

    fn doorbell_rung(&mut self, queue: u16) -> bool {
        match &self.requests {
            Some(requests) if queue == REQUESTS => {
                requests.answer_all();
                true
            }
            _ => false,
        }
    }

    fn reset(&mut self) {
        self.counted.was_reset();
        self.requests = None;
        self.iommu.common.faults.tell(None);
        self.iommu.reset();
    }

    fn save(&self) -> DeviceSpecific {
        self.iommu.save()
    }

    fn restore(&mut self, state: &DeviceSpecific, _started: Option<u64>) -> Result<(), StateError> {
        match state {
            DeviceSpecific::PowerOn => {
                self.iommu.power_on();
                Ok(())
            }
            DeviceSpecific::Iommu(state) => self.iommu.restore(state),
            _ => Err(StateError::Shape("kinds of device")),
        }
    }
}
