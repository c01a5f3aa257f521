//! A device's interrupts, which its workers signal.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::lost_interrupts::LostInterrupts;
use crate::os::eventfd::is_signalled;
use crate::state::{StateError, VectorState};

/// No vector (`virtio 1.4 §4.1.4.3`, `VIRTIO_MSI_NO_VECTOR`).
pub const NO_VECTOR: u16 = 0xffff;

/// The ISR bit of a queue's interrupt (`virtio 1.4 §4.1.4.5`).
const ISR_QUEUE: u8 = 1;
/// The ISR bit of a change of the device configuration.
const ISR_CONFIG: u8 = 2;

/// Called when a function asks its driver for a reset.
pub type NeedsResetObserver = dyn Fn() + Send + Sync;

/// The interrupts of one function: the MSI-X vector of each queue, an eventfd for each vector in use, the ISR status,
/// and the request for a reset.
///
/// Shared between the function, which maps vectors, and the workers, which signal. An eventfd signalled while its
/// vector is masked keeps the signal: it is the vector's pending bit (`PCIe 6.2 §7.7.2.5`).
pub struct Interrupts {
    config: AtomicU16,
    queues: Box<[AtomicU16]>,
    vectors: Box<[Mutex<Option<Arc<EventFd>>>]>,
    isr: AtomicU8,
    needs_reset: AtomicBool,
    observer: Arc<OnceLock<Arc<NeedsResetObserver>>>,
    lost: Arc<LostInterrupts>,
}

impl fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, queues, vectors, isr, needs_reset, observer: _, lost: _ } = self;
        let mut fields = f.debug_struct("Interrupts");
        fields.field("config", config).field("queues", queues).field("vectors", vectors);
        fields.field("isr", isr).field("needs_reset", needs_reset).finish_non_exhaustive()
    }
}

impl Interrupts {
    /// Creates interrupts without mapped vectors. `queues` and `vectors` are the device's own counts, never the
    /// guest's.
    pub fn new(queues: u16, vectors: u16) -> Self {
        Self {
            config: AtomicU16::new(NO_VECTOR),
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            vectors: (0..vectors).map(|_| Mutex::new(None)).collect(),
            isr: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
            observer: Arc::default(),
            lost: Arc::default(),
        }
    }

    /// The same, with `other`'s observer of reset requests, and the interrupts that it will lose.
    pub(crate) fn observed_as(self, other: &Self) -> Self {
        Self { observer: Arc::clone(&other.observer), lost: Arc::clone(&other.lost), ..self }
    }

    /// Loses the next `count` interrupts of `vector`, or of all vectors, of the function `name`, because the host asks
    /// for it.
    pub(crate) fn lose(&self, name: String, vector: Option<u16>, count: u32) {
        self.lost.arm(name, vector, count);
    }

    /// Calls `observer` from now on when the device asks for a reset. The first observer stays.
    pub(crate) fn observe_needs_reset(&self, observer: &Arc<NeedsResetObserver>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    /// The vector of configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config.load(Ordering::Relaxed)
    }

    /// The vector of `queue`; [`NO_VECTOR`] for a queue that does not exist.
    pub fn queue_vector(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    /// Maps configuration changes to `vector`. A vector that does not exist, or for which there is no eventfd, maps to
    /// [`NO_VECTOR`], as the driver then reads back (`virtio 1.4 §4.1.5.1.2.1`).
    pub fn set_config_vector(&self, vector: u16) {
        self.config.store(self.usable(vector), Ordering::Relaxed);
    }

    /// Maps `queue` to `vector`, as [`Self::set_config_vector`] does.
    pub fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(slot) = self.queues.get(usize::from(queue)) {
            slot.store(self.usable(vector), Ordering::Relaxed);
        }
    }

    fn usable(&self, vector: u16) -> u16 {
        match self.eventfd_or_new(vector) {
            Ok(Some(_)) => vector,
            Ok(None) | Err(_) => NO_VECTOR,
        }
    }

    fn eventfd_or_new(&self, vector: u16) -> io::Result<Option<Arc<EventFd>>> {
        let Some(slot) = self.vectors.get(usize::from(vector)) else { return Ok(None) };
        let mut slot = slot.lock();
        if slot.is_none() {
            *slot = Some(Arc::new(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?));
        }
        Ok(slot.clone())
    }

    /// The eventfd of `vector`, if anything was ever mapped to it.
    pub fn eventfd(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.vectors.get(usize::from(vector))?.lock().clone()
    }

    /// Signals that `queue` has used buffers. Without a vector the driver can only poll the ISR status.
    pub fn signal_queue(&self, queue: u16) {
        if !self.signal(self.queue_vector(queue)) {
            self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
        }
    }

    /// Signals a change of the device configuration or the device status. Sets the ISR status with and without a vector
    /// (`virtio 1.4 §4.1.4.5.1`): a driver that also uses the vector for something else, as DPDK's does, reads the
    /// cause there.
    pub fn signal_config(&self) {
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.signal(self.config_vector());
    }

    /// Asks the driver for a reset after an error that only a reset clears: sets DEVICE_NEEDS_RESET in the device
    /// status, and signals a configuration change (`virtio 1.4 §2.1.2`). Called after DRIVER_OK only, before which
    /// nothing runs.
    pub fn ask_for_reset(&self) {
        let asked_before = self.needs_reset.swap(true, Ordering::AcqRel);
        self.signal_config();
        if let Some(observer) = self.observer.get().filter(|_| !asked_before) {
            observer();
        }
    }

    /// Sets the request for a reset.
    pub(crate) fn set_needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
    }

    /// True if [`Self::ask_for_reset`] was called since the last reset.
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Signals `vector`; returns true if it is mapped.
    fn signal(&self, vector: u16) -> bool {
        let eventfd = self.eventfd(vector);
        if let Some(eventfd) = eventfd.as_ref().filter(|_| !self.lost.loses(vector)) {
            // A full counter means that a signal is pending already.
            let _ = eventfd.write(1);
        }
        eventfd.is_some()
    }

    /// True if a signal waits in the eventfd of `vector`.
    pub(crate) fn is_signalled(&self, vector: u16) -> bool {
        self.eventfd(vector).is_some_and(|eventfd| is_signalled(&eventfd))
    }

    /// The vectors that have an eventfd, in ascending order.
    pub(crate) fn save(&self) -> Vec<VectorState> {
        let vectors = (0..).zip(&self.vectors).filter_map(|(vector, slot)| Some((vector, slot.lock().clone()?)));
        vectors.map(|(vector, eventfd)| VectorState { vector, signalled: is_signalled(&eventfd) }).collect()
    }

    /// Opens the eventfds of `vectors` and sets the ISR status, after a reset.
    ///
    /// # Errors
    ///
    /// Fails if there is no such vector, or no eventfd for it.
    pub(crate) fn restore(&self, vectors: &[VectorState], isr: u8) -> Result<(), StateError> {
        for &VectorState { vector, signalled } in vectors {
            let eventfd = self.eventfd_or_new(vector).map_err(|error| StateError::Eventfd { vector, error })?;
            let eventfd = eventfd.ok_or(StateError::Shape("numbers of interrupt vectors"))?;
            if signalled {
                // A new counter is not full.
                let _ = eventfd.write(1);
            }
        }
        self.isr.store(isr & (ISR_QUEUE | ISR_CONFIG), Ordering::Release);
        Ok(())
    }

    /// The ISR status. Reading it here does not clear it.
    pub(crate) fn isr(&self) -> u8 {
        self.isr.load(Ordering::Acquire)
    }

    /// Reads and clears the ISR status.
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// Unmaps everything, closes the eventfds, and clears the ISR status and the request for a reset, as a reset of the
    /// device does.
    pub fn reset(&self) {
        let Self { config, queues, vectors, isr, needs_reset, observer: _, lost: _ } = self;
        config.store(NO_VECTOR, Ordering::Relaxed);
        for queue in queues {
            queue.store(NO_VECTOR, Ordering::Relaxed);
        }
        for vector in vectors {
            *vector.lock() = None;
        }
        isr.store(0, Ordering::Release);
        needs_reset.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::eventfd::borrow;

    #[test]
    fn a_vector_beyond_the_table_maps_to_none() {
        let interrupts = Interrupts::new(2, 3);
        interrupts.set_queue_vector(0, 3);
        interrupts.set_config_vector(2);
        assert_eq!((interrupts.queue_vector(0), interrupts.config_vector()), (NO_VECTOR, 2));
        interrupts.set_queue_vector(2, 0);
        assert_eq!(interrupts.queue_vector(2), NO_VECTOR);
        assert!(interrupts.eventfd(0).is_none());
    }

    #[test]
    fn a_signal_goes_to_the_queues_vector_and_waits_there() {
        let interrupts = Interrupts::new(2, 3);
        interrupts.set_queue_vector(1, 2);
        interrupts.signal_queue(1);
        interrupts.signal_queue(1);
        assert_eq!(interrupts.eventfd(2).unwrap().read().unwrap(), 2);
        assert_eq!(interrupts.take_isr(), 0);
    }

    #[test]
    fn interrupts_that_the_host_wants_lost_do_not_arrive() {
        let interrupts = Interrupts::new(2, 3);
        (0..2).for_each(|queue| interrupts.set_queue_vector(queue, queue + 1));
        interrupts.lose("pf0v3".to_string(), Some(1), 2);
        let arrived = |vector| interrupts.eventfd(vector).unwrap().read().unwrap_or(0);
        let signal = |queue, times| (0..times).for_each(|_| interrupts.signal_queue(queue));
        signal(0, 5);
        signal(1, 5);
        assert_eq!((arrived(1), arrived(2), interrupts.take_isr()), (3, 5, 0));
        interrupts.lose("pf0v3".to_string(), None, 4);
        let after_reset = Interrupts::new(2, 3).observed_as(&interrupts);
        signal(0, 1);
        signal(1, 1);
        after_reset.set_queue_vector(0, 1);
        (0..3).for_each(|_| after_reset.signal_queue(0));
        assert_eq!((interrupts.is_signalled(1), interrupts.is_signalled(2)), (false, false));
        assert_eq!(after_reset.eventfd(1).unwrap().read().unwrap(), 1, "four were lost");
        interrupts.lose("pf0v3".to_string(), None, 4);
        interrupts.lose("pf0v3".to_string(), None, 0);
        signal(0, 1);
        assert_eq!(arrived(1), 1, "0 ends it");
    }

    /// virtio 1.4 §4.1.4.5.1: only for queues does it matter whether MSI-X is enabled.
    #[test]
    fn a_config_change_sets_the_isr_even_with_a_vector() {
        let interrupts = Interrupts::new(1, 1);
        interrupts.set_config_vector(0);
        interrupts.signal_config();
        assert_eq!(interrupts.eventfd(0).unwrap().read().unwrap(), 1);
        assert_eq!((interrupts.take_isr(), interrupts.take_isr()), (ISR_CONFIG, 0));
    }

    #[test]
    fn an_eventfd_does_not_block_and_is_not_inherited() {
        let interrupts = Interrupts::new(0, 1);
        interrupts.set_config_vector(0);
        let eventfd = interrupts.eventfd(0).unwrap();
        let fd = borrow(&eventfd);
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert!(rustix::fs::fcntl_getfl(fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    }

    #[test]
    fn without_a_vector_a_signal_sets_the_isr_once() {
        let interrupts = Interrupts::new(1, 1);
        interrupts.signal_queue(0);
        interrupts.signal_config();
        assert_eq!((interrupts.take_isr(), interrupts.take_isr()), (ISR_QUEUE | ISR_CONFIG, 0));
    }
}
