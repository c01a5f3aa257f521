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
use crate::frames::net_protocol::Offloads;
use crate::{DmaSpace, GuestMap};

/// A backend that runs a device's queues itself. The device handles its registers; a NIC also the link, and the control
/// queue unless the backend runs that, too.
///
/// Called by a single thread at a time: first the one that plugs the device in, then the device's worker, never a vCPU.
/// A call may wait for the backend, but not forever.
pub trait QueueRunner: Send {
    /// The kind and the abilities of the backend. They never change while the NIC exists; if the other end is replaced,
    /// the new one must have the same abilities.
    fn ability(&self) -> Ability;

    /// Records that the NIC offers drivers `features`, and `mtu` if there is one. A replacement of the backend's other
    /// end needs these abilities, and no others.
    fn promise(&mut self, _features: u64, _mtu: Option<u16>) {}

    /// Starts the queues of `run`: at DRIVER_OK, and again after [`Self::stop`] or [`Self::recover`].
    ///
    /// # Errors
    ///
    /// Fails if the backend fails or refuses. It then touches neither the queues nor guest memory.
    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError>;

    /// Stops the queues that were started. The backend then touches neither them nor guest memory, unless it [may
    /// still write](Self::may_still_write).
    ///
    /// Returns the position of each queue of [`QueueRun::queues`], in that order: the index of the next buffer that it
    /// would take from the available ring. `None` means that the position is unknown, as after a loss: buffers that
    /// were taken and not returned are taken again.
    fn stop(&mut self) -> Vec<Option<u16>>;

    /// True if the other end may still write to guest memory although its queues were stopped: it has not confirmed the
    /// stop, and has not been replaced since.
    fn may_still_write(&self) -> bool {
        false
    }

    /// Takes the resources that the last stop has left open, which access neither queues nor guest memory. Closing them
    /// may take a grace period of the host's kernel, for which no caller has to wait.
    fn take_stopped(&mut self) -> Option<Box<dyn Any>> {
        None
    }

    /// True if its queues can be stopped and continued without a reset by the driver. If not, they keep running while
    /// the host has the link down.
    fn goes_on_after_stop(&self) -> bool {
        true
    }

    /// Makes `queue`, which was started, signal `call` from now on.
    ///
    /// # Errors
    ///
    /// Fails if the backend fails or refuses.
    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError>;

    /// Runs the first `pairs` of the queue pairs that were started, and leaves the others alone.
    ///
    /// # Errors
    ///
    /// Fails if the backend fails or refuses.
    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), RunnerError>;

    /// The device configuration of the backend, if it keeps one that drivers read unchanged.
    fn config(&self) -> &[u8] {
        &[]
    }

    /// Writes `data` at `offset` of the device configuration, for the driver.
    ///
    /// # Errors
    ///
    /// Fails if the backend fails. A backend that refuses leaves its configuration unchanged.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Restricts the offloaded frames that the backend delivers to `offloads`. Only called if
    /// [`Ability::switches_offloads`] is set.
    ///
    /// # Errors
    ///
    /// Fails if the backend cannot; the old setting stays in force.
    fn set_offloads(&self, _offloads: Offloads) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Gives the backend access to `memory` and nothing else, whether or not queues run ([`Self::stands_for_memory`]).
    /// No queue uses what was mapped before and is not in `memory`. A lost backend keeps `memory` for when it is back.
    ///
    /// # Errors
    ///
    /// Fails if the backend fails or refuses. It then keeps its old memory, or is lost.
    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError>;

    /// True if running queues must be stopped for [`Self::set_memory`] and started again afterwards, because a vCPU
    /// would otherwise wait for it.
    fn stands_for_memory(&self) -> bool {
        false
    }

    /// Makes the backend set a bit of `log` for each page of guest memory that it writes to from now on, whether or not
    /// queues run; without `log`, ends that. The backend sets the bit after the write, and all bits before
    /// [`Self::stop`] returns. Earlier writes are not in `log`. A lost backend keeps `log` for when it is back.
    ///
    /// # Errors
    ///
    /// Fails if the backend has no dirty log ([`Ability::logs_writes`]), fails or refuses. It then logs nothing, or is
    /// lost.
    fn set_log(&mut self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        match log {
            None => Ok(()),
            Some(_) => Err(RunnerError::of(LOG)(io::Error::new(io::ErrorKind::Unsupported, "it has no dirty log"))),
        }
    }

    /// Takes the state that the backend has besides its queues, such as connections that it holds for the guest, so
    /// that the backend of another host can continue from it. The queues do not run. `None` if there is no such state,
    /// or the backend is lost. [`Self::confirm_state`] checks that the state is complete.
    ///
    /// # Errors
    ///
    /// Fails if the state is not available before `until`. The backend can continue, or is lost.
    fn save_state(&mut self, _until: Instant) -> Result<Option<Vec<u8>>, RunnerError> {
        Ok(None)
    }

    /// Requests confirmation that [`Self::save_state`] has returned all of the state. The backend may exit after this,
    /// as passt does.
    ///
    /// # Errors
    ///
    /// Fails if the state was incomplete, or there is no reply before `until`.
    fn confirm_state(&mut self, _until: Instant) -> Result<(), RunnerError> {
        Ok(())
    }

    /// Loads the state of another backend into this one, whose queues have not run. Returns when all of it is loaded.
    ///
    /// # Errors
    ///
    /// Fails if the backend has no such state ([`Ability::has_state`]), refuses it, or has not loaded it before
    /// `until`.
    fn load_state(&mut self, _state: &[u8], _until: Instant) -> Result<(), RunnerError> {
        let why = io::Error::new(io::ErrorKind::Unsupported, "it has none");
        Err(RunnerError::of("load the backend's own state")(why))
    }

    /// Announces a NIC's address `mac` to the network, for a driver that does not: with these frames, each with an
    /// empty header, or in the backend's own way. Does nothing if the backend has no way.
    ///
    /// # Errors
    ///
    /// Fails if the backend is lost.
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

    /// Receives reports of the backend, without waiting. Called when one of [`Self::watched`] is readable, whether or
    /// not queues were started, and after each start.
    ///
    /// # Errors
    ///
    /// Fails if the backend is lost. It is stopped next, and then recovered.
    fn attend(&mut self) -> Result<Attention, RunnerError>;

    /// Reconnects to a backend that was lost. Retried about once a second, and when one of [`Self::watched`] is
    /// readable.
    ///
    /// # Errors
    ///
    /// Fails if the backend is still lost.
    fn recover(&mut self) -> Result<(), RunnerError>;
}

/// The action in errors about the dirty log.
pub(crate) const LOG: &str = "log what the backend writes";

/// The kind of a NIC's backend.
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

/// The kind and the abilities of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ability {
    /// The kind.
    pub kind: BackendKind,
    /// The name that users know: an interface, or the path of a socket or device.
    pub name: String,
    /// The feature bits that a NIC over it can offer. The NIC serves those about commands of the control queue, unless
    /// [`Self::control_queue`] is set.
    pub features: u64,
    /// The most pairs of queues that it runs; 0 if it is not a backend of a NIC.
    pub queue_pairs: u16,
    /// The largest size of a queue.
    pub queue_size: u16,
    /// The backend's own Ethernet address, if it has one.
    pub mac: Option<[u8; 6]>,
    /// The backend's own MTU in bytes, if it has one.
    pub mtu: Option<u16>,
    /// The backend runs the control queue, too.
    pub control_queue: bool,
    /// [`QueueRunner::set_offloads`] works.
    pub switches_offloads: bool,
    /// [`QueueRunner::set_log`] works: the backend has a dirty log.
    pub logs_writes: bool,
    /// The backend has state besides its queues, for [`QueueRunner::save_state`] and [`QueueRunner::load_state`].
    pub has_state: bool,
}

/// A queue as the backend needs it. Its rings lie in guest memory.
#[derive(Debug, Clone)]
pub struct RunnerQueue {
    /// The index that drivers use: twice the pair's for a receive queue, one more for the transmit queue.
    pub index: u16,
    /// The number of its descriptors.
    pub size: u16,
    /// The descriptor table.
    pub descriptors: GuestAddress,
    /// The available ring.
    pub available: GuestAddress,
    /// The used ring.
    pub used: GuestAddress,
    /// The index of the next buffer to take from the available ring.
    pub position: u16,
    /// Signalled by the driver's doorbell.
    pub kick: Arc<EventFd>,
    /// Signalled by the backend when it has used buffers.
    pub call: Arc<EventFd>,
}

/// The parameters for starting a driver's queues.
#[derive(Debug)]
pub struct QueueRun<'a> {
    /// The queues, in ascending order of their indices. A driver may leave some out.
    pub queues: &'a [RunnerQueue],
    /// The feature bits that the driver negotiated.
    pub features: u64,
    /// The guest's memory.
    pub memory: &'a GuestMap,
    /// The translation of the queues' addresses and of those in their descriptors. Not used by the holder of a pass of
    /// it.
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

/// A report of a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Nothing that concerns the driver.
    Nothing,
    /// The link is up or down.
    Link(bool),
    /// [`QueueRunner::config`] has changed.
    Config,
    /// The driver's rings are invalid.
    BrokenRing,
    /// The driver used an address that its function cannot access. The IOMMU has recorded the fault if that is its job.
    Unreachable,
    /// The function's mappings have changed so that the queues must be stopped and started.
    Restart,
}

/// A reason not to start a driver's queues.
#[derive(Debug, Error)]
pub enum StartError {
    /// The backend is lost, and will be recovered.
    #[error(transparent)]
    Lost(#[from] RunnerError),
    /// The backend works, but refuses the driver's setup: the driver has to reset the device.
    #[error(transparent)]
    Refused(RunnerError),
}

/// A request that a backend did not carry out.
#[derive(Debug, Error)]
#[error("cannot {what}: {source}")]
pub struct RunnerError {
    /// The request, to follow "cannot".
    pub what: &'static str,
    /// The cause.
    pub source: io::Error,
}

impl RunnerError {
    /// An error of `what`, for `map_err`.
    pub fn of<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self { what, source: source.into() }
    }
}
