//! The NIC behind all functions, as the data path sees it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use x550::{Direction, Effects, Nic, Place};

use super::vectors::Vectors;
use crate::DmaSpace;
use crate::os::clock;

/// A function, as far as its data path and its interrupts need it.
#[derive(Debug)]
struct Part {
    vectors: Vectors,
    memory: Mutex<DmaSpace>,
    /// Bus Master Enable is set, and the function and its PF are in D0.
    is_master: AtomicBool,
    /// The host holds the function.
    is_held: AtomicBool,
}

struct Inner {
    id: String,
    nic: Mutex<Nic>,
    /// The PF, then the VFs by index.
    parts: Box<[Part]>,
    /// The host holds the whole device.
    is_paused: AtomicBool,
    /// The beginning of the NIC's time.
    began: Instant,
    /// [`Nic::due`], or [`NEVER`].
    due: AtomicU64,
}

/// No interrupt waits.
const NEVER: u64 = u64::MAX;

/// The NIC of an [`X550Sriov`](super::X550Sriov), for the threads of its [`DataPath`](super::DataPath). Cloning it is
/// cheap.
///
/// A thread may use it without the device's lock. It locks the NIC alone, for the time of a few registers; the device
/// does the same in an access of the guest. The lock is never held while a thread of the data path is waited for.
#[derive(Clone)]
pub struct X550Handle(Arc<Inner>);

impl fmt::Debug for X550Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("X550Handle").field("id", &self.0.id).finish_non_exhaustive()
    }
}

impl X550Handle {
    /// `nic` of the device `id`, at power-on. `vectors` are the numbers of MSI-X vectors of the PF and of each VF.
    ///
    /// # Errors
    ///
    /// Fails if the host has no file descriptor for a vector.
    pub(super) fn new(id: String, nic: Nic, vectors: impl Iterator<Item = u16>, memory: &DmaSpace) -> io::Result<Self> {
        let part = |count| {
            let vectors = Vectors::new(count)?;
            let (is_master, is_held) = (AtomicBool::new(false), AtomicBool::new(false));
            Ok(Part { vectors, memory: Mutex::new(memory.clone()), is_master, is_held })
        };
        let parts = vectors.map(part).collect::<io::Result<_>>()?;
        let (is_paused, began, due) = (AtomicBool::new(false), clock::now(), AtomicU64::new(NEVER));
        Ok(Self(Arc::new(Inner { id, nic: Mutex::new(nic), parts, is_paused, began, due })))
    }

    /// The id of the device.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Locks the NIC, to read its queues, pools and counters. A call that returns [`Effects`] belongs into
    /// [`Self::change`], which sends its interrupts.
    pub fn lock(&self) -> MutexGuard<'_, Nic> {
        self.0.nic.lock()
    }

    /// Locks the NIC for a change, and sends the interrupts that this causes. The other effects are returned.
    ///
    /// The interrupts are sent with the lock held, so that none is left of a queue once its function was reset.
    pub fn change(&self, change: impl FnOnce(&mut Nic) -> Effects) -> Effects {
        let mut nic = self.0.nic.lock();
        let time = clock::now().saturating_duration_since(self.0.began);
        nic.set_time(u64::try_from(time.as_micros()).unwrap_or(NEVER));
        let effects = change(&mut nic);
        self.0.due.store(nic.due().unwrap_or(NEVER), Ordering::Release);
        for (place, vectors) in &effects.vectors {
            if let Some(part) = self.part(*place) {
                part.vectors.signal(*vectors);
            }
        }
        effects
    }

    /// Notifies the driver of queue `queue` of the NIC, 0 to 127, that descriptors were written back. Returns false if
    /// the interrupt waits, or is not needed.
    pub fn queue_event(&self, direction: Direction, queue: u16) -> bool {
        // An event of a queue has no other effects.
        !self.change(|nic| nic.queue_event(direction, queue)).vectors.is_empty()
    }

    /// Notifies the driver of transmit queue `queue` of the NIC, 0 to 127, that frames of this many descriptors and
    /// bytes were sent. Returns false if the interrupt waits, or is not needed.
    pub fn frames_sent(&self, queue: u16, descriptors: u32, bytes: u64) -> bool {
        !self.change(|nic| nic.frames_sent(queue, descriptors, bytes)).vectors.is_empty()
    }

    /// The time at which [`Self::send_deferred`] has something to do; `None` if no interrupt waits.
    pub fn due(&self) -> Option<Instant> {
        let due = self.0.due.load(Ordering::Acquire);
        // The NIC's time is whole microseconds, which have passed.
        (due != NEVER).then(|| self.0.began + Duration::from_micros(due))
    }

    /// Sends the interrupts whose time has come. Returns the functions.
    pub fn send_deferred(&self) -> Vec<(Place, u64)> {
        self.change(Nic::send_deferred).vectors
    }

    /// Sends the interrupts of a function that wait, or those of all functions.
    pub fn flush(&self, place: Option<Place>) {
        let _ = self.change(|nic| nic.flush(place));
    }

    /// Connects or disconnects the link, and notifies the PF's driver. All functions show the same link.
    pub fn set_link(&self, up: bool) {
        let _ = self.change(|nic| nic.set_link(up));
    }

    /// True if the function may move data now: Bus Master Enable is set, the function and its PF are in D0, and the
    /// host holds neither. Only then may a thread touch rings and buffers of queues that
    /// [`Nic::owner`] gives to the function. [`DataPath::queues_changed`](super::DataPath::queues_changed) follows each
    /// change.
    pub fn may_run(&self, place: Place) -> bool {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Acquire);
        let part = self.part(place).filter(|_| !is_set(&self.0.is_paused));
        part.is_some_and(|part| is_set(&part.is_master) && !is_set(&part.is_held))
    }

    /// The memory that the function reaches, by its own addresses: behind an IOMMU, those of its own routing ID. `None`
    /// if there is no such VF. It stays the same once the guest runs.
    pub fn memory(&self, place: Place) -> Option<DmaSpace> {
        Some(self.part(place)?.memory.lock().clone())
    }

    fn part(&self, place: Place) -> Option<&Part> {
        match place {
            Place::Pf => self.0.parts.first(),
            Place::Vf(index) => self.0.parts.get(usize::from(index) + 1),
        }
    }

    /// The vectors of a function; `None` if there is no such VF.
    pub(super) fn vectors(&self, place: Place) -> Option<&Vectors> {
        Some(&self.part(place)?.vectors)
    }

    pub(super) fn set_memory(&self, place: Place, memory: DmaSpace) {
        if let Some(part) = self.part(place) {
            *part.memory.lock() = memory;
        }
    }

    /// Records if the registers of a function let it be a bus master. Returns true if that is new.
    pub(super) fn set_master(&self, place: Place, is_master: bool) -> bool {
        self.part(place).is_some_and(|part| part.is_master.swap(is_master, Ordering::AcqRel) != is_master)
    }

    /// Holds a function, or releases it.
    pub(super) fn hold(&self, place: Place, held: bool) {
        if let Some(part) = self.part(place) {
            part.is_held.store(held, Ordering::Release);
        }
    }

    /// Holds all functions, or releases those that are not held by [`Self::hold`].
    pub(super) fn pause(&self, paused: bool) {
        self.0.is_paused.store(paused, Ordering::Release);
    }

    /// Resets a VF, and discards its interrupts.
    pub(super) fn reset_vf(&self, index: u16) -> Effects {
        self.change(|nic| {
            self.vectors(Place::Vf(index)).into_iter().for_each(Vectors::clear);
            nic.reset_vf(index)
        })
    }

    /// Resets the NIC, and discards the interrupts of all functions.
    pub(super) fn reset(&self) -> Effects {
        self.change(|nic| {
            self.0.parts.iter().for_each(|part| part.vectors.clear());
            nic.reset()
        })
    }
}
