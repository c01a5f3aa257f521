//! The interface that a virtio device requires of the VMM.
//!
//! A device does not push changes. The VMM reads what the device needs now, compares that with what it has done so far,
//! and applies the difference after dropping the device's lock.

use std::fmt;
use std::io;
use std::sync::Arc;

use pci::{Effects, HostBridge, Reach, Rid, VfIndex, WindowId};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    ConnectError, DeviceState, DoorbellPage, Fault, FaultError, FileMapping, FunctionStatus, HostNic, MemoryUser,
    NeedsResetObserver, NewBackend, SriovStatus, StateError, Thread,
};

/// The effect of an access to a device, with the queue workers that it stopped.
pub type Outcome = pci::Outcome<Thread>;

/// A device that can be plugged in.
pub trait VirtioPci: pci::Device<Stopping = Thread> + Signals + Inspect + Lifecycle {}

impl<D: pci::Device<Stopping = Thread> + Signals + Inspect + Lifecycle + ?Sized> VirtioPci for D {}

/// The wires of a device, by default one without virtqueues: eventfds for the guest's writes, eventfds that send the
/// guest messages, and memory.
pub trait Signals {
    /// Appends the doorbells of those queues of the functions in `reach` that run now.
    fn doorbells(&self, _reach: Reach, _out: &mut Vec<Doorbell>) {}

    /// Appends the messages that the functions in `reach` may send now: MSI-X and Bus Master are enabled, and neither
    /// the vector nor its function is masked.
    ///
    /// A vector that is signalled while it is not in this list keeps the signal in its eventfd, which is its pending
    /// bit.
    fn messages(&self, _reach: Reach, _out: &mut Vec<Message>) {}

    /// The interrupt pin of the device's own function, if it has one and uses that now. VFs never have one.
    fn pin(&self) -> Option<Pin> {
        None
    }

    /// Appends the memory that the guest finds in windows, if the device has any. It is always the same.
    fn memory(&self, _out: &mut Vec<MemoryArea>) {}

    /// Calls `observer` from now on for each function whose doorbells changed without an access. Only the first
    /// observer is kept. It is called on the device's own threads, which hold no lock that the other methods need.
    fn observe_doorbells(&self, _observer: &Arc<DoorbellObserver>) {}
}

/// The host's view of a device; by default of one without virtqueues, whose registers are all in configuration space.
pub trait Inspect {
    /// True if configuration space of function `rid`, which exists, has registers only: they change only by writes to
    /// configuration space, and reading them has no effect. Virtio's window into the BARs is more than that while a
    /// driver uses it (`virtio 1.4 §4.1.4.9`).
    fn config_is_static(&self, _rid: Rid) -> bool {
        true
    }

    /// The status of a function: the device's own for `None`, or a reserved VF. `None` if there is no such function, or
    /// no driver can have it.
    fn function_status(&self, _vf: Option<VfIndex>) -> Option<FunctionStatus> {
        None
    }

    /// The VFs that exist; `None` for a device that is not a PF.
    fn sriov_status(&self) -> Option<SriovStatus> {
        None
    }

    /// The port of a function that has one.
    fn host_nic(&mut self, _vf: Option<VfIndex>) -> Option<&mut dyn HostNic> {
        None
    }

    /// Calls `observer` from now on when a function asks its driver for a reset. Only the first observer is kept. It is
    /// called on any thread, even with the device's lock held.
    fn observe_needs_reset(&self, _observer: &Arc<NeedsResetObserver>) {}

    /// The queues of a function whose rings are invalid now, with the fault of each, in words: for the log. Rings that
    /// a worker runs, and those behind an IOMMU, are left out.
    fn broken_rings(&self, _vf: Option<VfIndex>) -> Vec<String> {
        Vec::new()
    }

    /// Logs the actions of drivers from now on (`-vv`), with `name` of each function at the start of a line.
    fn log_drivers(&mut self, _name: &dyn Fn(Option<VfIndex>) -> String) {}

    /// Appends the backends that access the guest's memory by themselves, with their functions. VFs that do not exist
    /// now are included.
    fn memory_users(&self, _out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {}
}

/// The host's operations on a device while a guest has it. By default there is nothing to pause.
pub trait Lifecycle {
    /// Stops all queues, and keeps them stopped until [`Self::resume`], in every state of the registers. No register
    /// changes and no queue loses its position. Accesses still work, even resets. A second pause does nothing.
    fn pause(&mut self) -> Outcome {
        Outcome::none()
    }

    /// Starts the queues that are enabled in the registers, from their positions. A function whose queues the host
    /// cannot start stays paused, and [`Self::take_not_resumed`] returns it; others resume.
    fn resume(&mut self) -> Outcome {
        Outcome::none()
    }

    /// As [`Self::pause`], for one function: the device's own for `None`, or a VF. Does nothing if there is no such
    /// function.
    fn pause_function(&mut self, _vf: Option<VfIndex>) -> Outcome {
        Outcome::none()
    }

    /// As [`Self::resume`], for one function.
    fn resume_function(&mut self, _vf: Option<VfIndex>) -> Outcome {
        Outcome::none()
    }

    /// Connects `new` to a network function whose backend is missing or lost. The function is paused, and its workers
    /// have exited. Leaves the old backend in `new`, to be dropped without the device's lock.
    ///
    /// # Errors
    ///
    /// Fails without any change.
    fn connect(&mut self, _vf: Option<VfIndex>, _new: &mut NewBackend) -> Result<(), ConnectError> {
        Err(ConnectError::NoNic)
    }

    /// Makes or arms `fault` in a function, for tests of its driver: the device's own for `None`, or a VF.
    ///
    /// # Errors
    ///
    /// Fails without any change if the function cannot have this fault now.
    fn inject(&mut self, _vf: Option<VfIndex>, _fault: Fault) -> Result<Outcome, FaultError> {
        Err(FaultError::NotVirtio)
    }

    /// A function that the last [`Self::resume`] left paused, if there is one.
    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        None
    }

    /// Saves the state of a device that is paused and whose workers have exited; `None` if no driver can change its
    /// state.
    ///
    /// # Errors
    ///
    /// [`StateError::Running`] if a queue runs or its worker has not exited.
    fn save(&self) -> Result<Option<DeviceState>, StateError>;

    /// Restores `state` to a device that is paused, or whose queues never ran, and leaves it paused. VFs that are
    /// enabled in `state` are enabled without a reset; queues continue from their positions once the device is resumed.
    /// Afterwards the caller reconciles as after a reset.
    ///
    /// # Errors
    ///
    /// [`StateError::Running`] if a queue runs: nothing has changed. Any other [`StateError`] if the state is from
    /// another device, or unreachable by a driver: the device is paused in its power-on state.
    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError>;
}

/// All effects of queues that started or stopped in the functions in `reach`.
pub(crate) fn queues_changed(reach: Reach, stopping: Vec<Thread>) -> Outcome {
    Outcome { effects: Effects::QUEUES, reach, stopping }
}

/// A host bridge has no queues, and no registers to write.
impl<S> Signals for HostBridge<S> {}

impl<S> Inspect for HostBridge<S> {}

impl<S> Lifecycle for HostBridge<S> {
    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Ok(None)
    }

    fn restore(&mut self, _state: &DeviceState) -> Result<(), StateError> {
        Err(StateError::Shape("functions"))
    }
}

/// Memory that the guest finds in a window.
#[derive(Debug, Clone)]
pub struct MemoryArea {
    /// The window.
    pub window: WindowId,
    /// The offset of the memory in the window, a multiple of the page size.
    pub offset: u64,
    /// The memory, a multiple of the page size.
    pub memory: Arc<FileMapping>,
    /// The devices that access it besides the guest.
    pub peers: Option<Arc<dyn MemoryPeers>>,
}

/// Devices that access another device's memory at the guest's addresses, while it is mapped for the guest.
pub trait MemoryPeers: fmt::Debug + Send + Sync {
    /// Maps `memory` at `address` for the peers. Those that cannot map it work without it.
    fn map(&self, address: u64, memory: &Arc<FileMapping>);

    /// Unmaps `memory` for the peers. On return, none of them accesses it there.
    fn unmap(&self, address: u64, memory: &Arc<FileMapping>);
}

/// A doorbell: a guest's write of any value to `offset` of `window` signals `eventfd`.
#[derive(Debug, Clone)]
pub struct Doorbell {
    /// The function that has the queue.
    pub function: Rid,
    /// The window that the doorbell lies in.
    pub window: WindowId,
    /// The offset of its first byte in that window.
    pub offset: u64,
    /// The eventfd that a write signals. Several doorbells may share one.
    pub eventfd: Arc<EventFd>,
    /// A page that the guest may be given instead. Then `offset` starts a page that has only this doorbell.
    pub page: Option<Arc<DoorbellPage>>,
}

/// An interrupt pin, whose level the device holds until it is served.
#[derive(Debug, Clone)]
pub struct Pin {
    /// A signal asserts it.
    pub trigger: Arc<EventFd>,
    /// Signalled when the guest has ended the interrupt, which deasserts the pin. A device that still needs service
    /// then signals `trigger` again. An additional signal is harmless.
    pub resample: Arc<EventFd>,
}

/// A function that stays paused, because the host lacks something.
#[derive(Debug)]
pub struct NotResumed {
    /// The VF; `None` for the device's own function.
    pub vf: Option<VfIndex>,
    /// The error of the host.
    pub error: io::Error,
}

/// A callback for changed doorbells of a function.
pub type DoorbellObserver = dyn Fn(Rid) + Send + Sync;

/// A signal on `eventfd` sends this message.
#[derive(Debug, Clone)]
pub struct Message {
    /// The requester: the function's own routing ID, a VF's for a VF.
    pub requester: Rid,
    /// The message address.
    pub address: u64,
    /// The message data.
    pub data: u32,
    /// The eventfd that sends it.
    pub eventfd: Arc<EventFd>,
}
