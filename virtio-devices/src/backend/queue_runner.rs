//! Backends that run a device's queues themselves: the host's kernel, another process, or a device.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::{DoorbellPages, SharedLog};
use crate::net_protocol::Offloads;
use crate::{DmaSpace, GuestMap};

/// A backend that runs a device's queues itself. The device handles its registers; a NIC also the link, and the control
/// queue unless the backend runs that, too.
///
/// One thread at a time calls it: first the one that plugs the device in, then the device's worker, never a vCPU. A
/// call may wait for the backend, but not forever.
pub trait QueueRunner: Send {
    /// What the backend is and can do. This never changes while the NIC exists; if the other end is replaced, the new
    /// one must have the same abilities.
    fn ability(&self) -> Ability;

    /// The NIC offers drivers `features`, and `mtu` if there is one. A replacement of the backend's other end needs
    /// these abilities, and no others.
    fn promise(&mut self, _features: u64, _mtu: Option<u16>) {}

    /// Starts the queues of `run`: at DRIVER_OK, and again after [`Self::stop`] or [`Self::recover`].
    ///
    /// # Errors
    ///
    /// When the backend fails or refuses. It then touches neither the queues nor guest memory.
    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError>;

    /// Stops the queues that were started. The backend then touches neither them nor guest memory, unless it [may
    /// still write](Self::may_still_write).
    ///
    /// Returns the position of each queue of [`QueueRun::queues`], in that order: the index of the next buffer that it
    /// would take from the available ring. `None` means that the position is unknown, as after a loss: buffers that
    /// were taken and not returned are taken again.
    fn stop(&mut self) -> Vec<Option<u16>>;

    /// Whether the other end may still write to guest memory although its queues were stopped: it has not said that it
    /// has stopped them, and nothing has taken its place since.
    fn may_still_write(&self) -> bool {
        false
    }

    /// What the last stop has left open, which reaches neither queues nor guest memory. To close it may take as long as
    /// the host's kernel needs to be sure of that, and nobody has to wait.
    fn take_stopped(&mut self) -> Option<Box<dyn Any>> {
        None
    }

    /// Whether its queues can be stopped and continued without a reset by the driver. If not, they keep running while
    /// the host has the link down.
    fn goes_on_after_stop(&self) -> bool {
        true
    }

    /// Makes `queue`, which was started, signal `call` from now on.
    ///
    /// # Errors
    ///
    /// When the backend fails or refuses.
    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError>;

    /// Runs the first `pairs` of the queue pairs that were started, and leaves the others alone.
    ///
    /// # Errors
    ///
    /// When the backend fails or refuses.
    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), RunnerError>;

    /// The device configuration as the backend has it, if it keeps one that drivers read as it is.
    fn config(&self) -> &[u8] {
        &[]
    }

    /// Writes `data` at `offset` of the device configuration, for the driver.
    ///
    /// # Errors
    ///
    /// When the backend fails. One that refuses leaves its configuration as it is.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Restricts the offloaded frames that the backend delivers to `offloads`. Only called if
    /// [`Ability::switches_offloads`] is set.
    ///
    /// # Errors
    ///
    /// When it cannot; the old setting stays in force.
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes the backend reach `memory`, whether or not queues run ([`Self::stands_for_memory`]), and nothing else.
    /// What was there before and is not in `memory` is used by no queue. A backend that is lost keeps `memory` for when
    /// it is back.
    ///
    /// # Errors
    ///
    /// When the backend fails or refuses. It then reaches what it reached before, or is lost.
    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError>;

    /// Whether queues that run have to be stopped for [`Self::set_memory`], and started again after it, because a vCPU
    /// would wait for that to be done.
    fn stands_for_memory(&self) -> bool {
        false
    }

    /// From now on has the backend set a bit of `log` for each page of guest memory that it writes to, whether or not
    /// queues run; without `log` it does not any more. It sets the bit after it has written, and all bits before
    /// [`Self::stop`] returns. What it wrote before this call is not in `log`. A backend that is lost keeps `log` for
    /// when it is back.
    ///
    /// # Errors
    ///
    /// When the backend has no dirty log ([`Ability::logs_writes`]), fails or refuses. It then logs nothing, or is
    /// lost.
    fn set_log(&mut self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        match log {
            None => Ok(()),
            Some(_) => Err(RunnerError::of(LOG)(io::Error::new(io::ErrorKind::Unsupported, "it has no dirty log"))),
        }
    }

    /// Takes the state that the backend has beside its queues, such as connections that it holds for the guest, for the
    /// backend of another host to go on with. The queues do not run. `None` if it has none, or is lost. Whether this
    /// was all, [`Self::confirm_state`] tells.
    ///
    /// # Errors
    ///
    /// When it cannot be had until `until`. The backend can go on, or is lost.
    fn save_state(&mut self, _until: Instant) -> Result<Option<Vec<u8>>, RunnerError> {
        Ok(None)
    }

    /// Has the backend confirm that what [`Self::save_state`] has returned was all of its state. It may end itself
    /// after this, as passt does.
    ///
    /// # Errors
    ///
    /// When it was not, or there is no answer until `until`.
    fn confirm_state(&mut self, _until: Instant) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Gives the backend, whose queues have not run, the state of another. Returns when it has taken all of it.
    ///
    /// # Errors
    ///
    /// When the backend has no such state ([`Ability::has_state`]), refuses it, or has not taken it until `until`.
    fn load_state(&mut self, _state: &[u8], _until: Instant) -> Result<(), RunnerError> {
        let why = io::Error::new(io::ErrorKind::Unsupported, "it has none");
        Err(RunnerError::of("load the backend's own state")(why))
    }

    /// Announces a NIC's address `mac` to the network, for a driver that does not: by these frames, each with an empty
    /// header, or in the backend's own way. One that has no way does nothing.
    ///
    /// # Errors
    ///
    /// When the backend is lost.
    fn announce(&mut self, _mac: [u8; 6], _frames: &[Vec<u8>]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// The doorbell pages that the guest can write to directly while queues run. The same object for the life of the
    /// NIC; `None` if there are never any.
    fn doorbell_pages(&self) -> Option<Arc<DoorbellPages>> {
        None
    }

    /// The descriptors that become readable when the backend has something to report. A lost connection is not among
    /// them: it would stay readable.
    fn watched(&self) -> Vec<BorrowedFd<'_>>;

    /// Receives what the backend reports, without waiting. Called when one of [`Self::watched`] is readable, whether or
    /// not queues were started, and after each start.
    ///
    /// # Errors
    ///
    /// When the backend is lost. It is stopped next, and then recovered.
    fn attend(&mut self) -> Result<Attention, RunnerError>;

    /// Reconnects to a backend that was lost. Retried about once a second, and when one of [`Self::watched`] is
    /// readable.
    ///
    /// # Errors
    ///
    /// When it is still lost.
    fn recover(&mut self) -> Result<(), RunnerError>;
}

/// What a backend that cannot log its writes cannot do.
pub(crate) const LOG: &str = "log what the backend writes";

/// What a NIC's backend is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// A tap; this process moves the frames.
    Tap,
    /// A tap; the host's kernel moves the frames.
    VhostNet,
    /// Another process, over a socket.
    VhostUser,
    /// A vDPA device of the host.
    Vdpa,
    /// The port of a switch; this process moves the frames.
    Switch,
    /// None: it is missing, and the link is down.
    Absent,
}

/// What a backend is, and what it can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ability {
    /// Its kind.
    pub kind: BackendKind,
    /// What users call it: an interface, or the path of a socket or device.
    pub name: String,
    /// The feature bits that a NIC over it can offer. The NIC serves those about commands of the control queue, unless
    /// [`Self::control_queue`] is set.
    pub features: u64,
    /// The most pairs of queues that it runs; 0 if it is no backend of a NIC.
    pub queue_pairs: u16,
    /// The largest size of a queue.
    pub queue_size: u16,
    /// Its Ethernet address, if it has one of its own.
    pub mac: Option<[u8; 6]>,
    /// Its MTU in bytes, if it has one of its own.
    pub mtu: Option<u16>,
    /// It runs the control queue, too.
    pub control_queue: bool,
    /// [`QueueRunner::set_offloads`] works.
    pub switches_offloads: bool,
    /// [`QueueRunner::set_log`] works: the backend can say which pages of guest memory it writes to.
    pub logs_writes: bool,
    /// It has a state beside its queues, which [`QueueRunner::save_state`] takes and [`QueueRunner::load_state`] gives.
    pub has_state: bool,
}

/// A queue as the backend needs it. Its rings lie in guest memory.
#[derive(Debug, Clone)]
pub struct RunnerQueue {
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
    /// Signalled by the driver's doorbell.
    pub kick: Arc<EventFd>,
    /// Signalled by the backend when it has used buffers.
    pub call: Arc<EventFd>,
}

/// What a backend needs to start a driver's queues.
#[derive(Debug)]
pub struct QueueRun<'a> {
    /// The queues, in ascending order of their indices. A driver may leave some out.
    pub queues: &'a [RunnerQueue],
    /// The feature bits that the driver negotiated.
    pub features: u64,
    /// The guest's memory.
    pub memory: &'a GuestMap,
    /// What the addresses of the queues and of what is in them stand for. Not used by who holds a pass of it.
    pub dma: &'a DmaSpace,
    /// The offloaded frames that the driver takes.
    pub offloads: Offloads,
    /// The pairs of queues that the driver uses: the first ones.
    pub active_pairs: u16,
    /// Drop frames that arrived earlier: this is the first start since a reset, or the link was down.
    pub fresh: bool,
    /// No start was tried since the driver's reset, so nothing has been taken from its rings.
    pub untouched: bool,
}

/// What a backend reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Nothing that concerns the driver.
    Nothing,
    /// Its link is up or down.
    Link(bool),
    /// [`QueueRunner::config`] has changed.
    Config,
    /// The driver's rings are invalid.
    BrokenRing,
    /// The driver named an address at which its function reaches nothing, of which the IOMMU has been told if that is
    /// its business.
    Unreachable,
    /// What the function reaches is another thing now, and the queues have to be stopped and started for that.
    Restart,
}

/// Why a backend does not start a driver's queues.
#[derive(Debug, Error)]
pub enum StartError {
    /// The backend is lost, and will be recovered.
    #[error(transparent)]
    Lost(#[from] RunnerError),
    /// The backend works, and refuses what the driver has set up: the driver has to reset the device.
    #[error(transparent)]
    Refused(RunnerError),
}

/// A request that a backend did not carry out.
#[derive(Debug, Error)]
#[error("cannot {what}: {source}")]
pub struct RunnerError {
    /// The request, to follow "cannot".
    pub what: &'static str,
    /// Why not.
    pub source: io::Error,
}

impl RunnerError {
    /// An error of `what`, for `map_err`.
    pub fn of<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { what, source: source.into() }
    }
}
