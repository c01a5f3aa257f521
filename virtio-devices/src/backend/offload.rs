//! Backends that run a NIC's queues by themselves: the host's kernel, another process, or a device.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::{BackendKind, DoorbellPages, Offloads};

/// A backend that runs a NIC's queues by itself. Its NIC sees to the device's registers, to the control queue unless the backend has
/// one, and to the link.
///
/// It is called by one thread at a time: by the one that plugs the NIC in, and then by the NIC's worker, which is never a vCPU's. A
/// call may wait for the backend, but not forever.
pub trait Offload: Send {
    /// What it is and what it can do. That stays as it is for the life of the NIC; if the backend's other end is replaced, the new one
    /// has to be able to do as much.
    fn ability(&self) -> Ability;

    /// The NIC has told drivers that they may negotiate `features`, and `mtu` if it told one: whoever takes the place of the backend's
    /// other end has to be able to do so much, and need not be able to do more.
    fn promise(&mut self, _features: u64, _mtu: Option<u16>) {}

    /// Starts the queues of `run`: at DRIVER_OK, and again after [`Self::stop`] or [`Self::recover`].
    ///
    /// # Errors
    ///
    /// When the backend does not do it. It touches neither the queues nor guest memory then.
    fn start(&mut self, run: &OffloadRun<'_>) -> Result<(), StartError>;

    /// Stops the queues that were started. After that the backend touches neither them nor guest memory.
    ///
    /// Returns where each queue of [`OffloadRun::queues`] goes on, in their order: the index of the next buffer that it would take
    /// from the available ring. `None` for one of which that is not known, as after a loss: all that it took and did not give back is
    /// taken again.
    fn stop(&mut self) -> Vec<Option<u16>>;

    /// Whether its queues can stand still while a driver runs on, and go on after that without a reset by the driver. If not, they run
    /// although the host has taken the link down.
    fn goes_on_after_stop(&self) -> bool {
        true
    }

    /// Has `queue`, which was started, signal `call` from now on.
    ///
    /// # Errors
    ///
    /// When the backend does not do it.
    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), OffloadError>;

    /// Runs the first `pairs` pairs of queues of those that were started, and lets the others be.
    ///
    /// # Errors
    ///
    /// When the backend does not do it.
    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), OffloadError>;

    /// Has it deliver offloaded frames of these kinds only, while it runs. Only one with [`Ability::switches_offloads`] is asked.
    ///
    /// # Errors
    ///
    /// When it cannot; it goes on as before then.
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The doorbells that it lets the guest write to by itself, while it runs queues. The same for the life of the NIC; `None` if there
    /// never are any.
    fn doorbell_pages(&self) -> Option<Arc<DoorbellPages>> {
        None
    }

    /// The descriptors that become readable when the backend has something to say. What was lost is not among them: it would be
    /// readable for ever.
    fn watched(&self) -> Vec<BorrowedFd<'_>>;

    /// Hears what the backend has to say, without waiting: called when one of [`Self::watched`] is readable, whether queues were started or
    /// not, and after each start.
    ///
    /// # Errors
    ///
    /// When the backend is lost. It is stopped next, and then recovered.
    fn attend(&mut self) -> Result<Attention, OffloadError>;

    /// Gets the backend back after it was lost: tried again and again, about once a second, and when one of [`Self::watched`] is
    /// readable.
    ///
    /// # Errors
    ///
    /// When it is still lost.
    fn recover(&mut self) -> Result<(), OffloadError>;
}

/// What a backend is, and what it can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ability {
    /// Its kind.
    pub kind: BackendKind,
    /// What users call it: an interface, or the path of a socket or device.
    pub name: String,
    /// The feature bits that a NIC over it may offer. Those that are about commands of the control queue are served by the NIC unless
    /// [`Self::control_queue`] says otherwise.
    pub features: u64,
    /// The most pairs of queues that it runs.
    pub queue_pairs: u16,
    /// The largest size of a queue.
    pub queue_size: u16,
    /// Its Ethernet address, if it has one of its own.
    pub mac: Option<[u8; 6]>,
    /// Its MTU in bytes, if it has one of its own.
    pub mtu: Option<u16>,
    /// It runs the control queue, too.
    pub control_queue: bool,
    /// [`Offload::set_offloads`] works.
    pub switches_offloads: bool,
}

/// A queue as the backend needs it. Its rings lie in guest memory.
#[derive(Debug, Clone)]
pub struct OffloadQueue {
    /// Its index, as the driver counts: twice the pair's for a receive queue, one more for the transmit queue.
    pub index: u16,
    /// The number of its descriptors.
    pub size: u16,
    /// Its descriptor table.
    pub descriptors: GuestAddress,
    /// Its available ring.
    pub available: GuestAddress,
    /// Its used ring.
    pub used: GuestAddress,
    /// The index of the next buffer to take from the available ring.
    pub position: u16,
    /// Signalled when the driver rings.
    pub kick: Arc<EventFd>,
    /// To signal when the driver has something to see.
    pub call: Arc<EventFd>,
}

/// What a backend is started with.
#[derive(Debug)]
pub struct OffloadRun<'a> {
    /// The queues, in ascending order of their indices. A driver may leave some out.
    pub queues: &'a [OffloadQueue],
    /// The feature bits that the driver negotiated.
    pub features: u64,
    /// The guest's memory.
    pub memory: &'a GuestMemoryMmap,
    /// The offloaded frames that the driver takes.
    pub offloads: Offloads,
    /// The pairs of queues that the driver uses: the first ones.
    pub active_pairs: u16,
    /// Frames that came before are not for the driver: it is its first start since a reset, or its link was down.
    pub fresh: bool,
    /// No start has been tried for the driver since its reset: nobody has taken anything from its rings.
    pub untouched: bool,
}

/// What a backend has to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Nothing that the driver has to know.
    Nothing,
    /// Its link is up or down.
    Link(bool),
    /// The driver's rings make no sense to it.
    BrokenRing,
}

/// Why a backend does not run a driver's queues.
#[derive(Debug, Error)]
pub enum StartError {
    /// It is lost. It is recovered next.
    #[error(transparent)]
    Lost(#[from] OffloadError),
    /// It is there, and what the driver has set up makes no sense to it: the driver has to reset the device.
    #[error(transparent)]
    Refused(OffloadError),
}

/// Why a backend does not do what it was asked.
#[derive(Debug, Error)]
#[error("cannot {what}: {source}")]
pub struct OffloadError {
    /// What it was asked, to follow "cannot".
    pub what: &'static str,
    /// Why not.
    pub source: io::Error,
}

impl OffloadError {
    /// An error of `what`, for `map_err`.
    pub fn of<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { what, source: source.into() }
    }
}
