//! What a virtio device requires of the VMM.
//!
//! A device does not push changes. The VMM asks what the device wants now, compares that with what it has done so far,
//! and applies the difference after dropping the device's lock.

use std::fmt;
use std::io;
use std::sync::Arc;

use pci::{Effects, HostBridge, Reach, Rid, VfIndex, WindowId};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    ConnectError, DeviceState, DoorbellPage, FileMapping, FunctionStatus, MemoryUser, NeedsResetObserver, NewBackend,
    Port, SriovStatus, StateError, Thread,
};

/// What an access to a device did. What it stopped are queue workers.
pub type Outcome = pci::Outcome<Thread>;

/// A device that can be plugged in.
pub trait VirtioPci: pci::Device<Stopping = Thread> + Signals + Inspect + Lifecycle {}

impl<D: pci::Device<Stopping = Thread> + Signals + Inspect + Lifecycle + ?Sized> VirtioPci for D {}

/// The wires that a device wants: eventfds that the guest's writes signal, eventfds that send the guest messages, and
/// memory.
pub trait Signals {
    /// Appends the doorbells of those queues of the functions in `reach` that run now.
    fn doorbells(&self, reach: Reach, out: &mut Vec<Doorbell>);

    /// Appends the messages that the functions in `reach` may send now: MSI-X and Bus Master are enabled, and neither
    /// the vector nor its function is masked.
    ///
    /// A vector that is signalled while it is not in this list keeps the signal in its eventfd, which is its pending
    /// bit.
    fn messages(&self, reach: Reach, out: &mut Vec<Message>);

    /// The interrupt pin of the device's own function, if it has one and uses that now. VFs never have one.
    fn pin(&self) -> Option<Pin> {
        None
    }

    /// Appends the memory that the guest is to find in windows, if the device has any. It is always the same.
    fn memory(&self, _out: &mut Vec<MemoryArea>) {}

    /// Calls `observer` from now on for each function whose doorbells changed without an access. The first observer
    /// stays. It is called on the device's own threads, which hold no lock that the other methods need.
    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>);
}

/// What the host can see of a device.
pub trait Inspect {
    /// Whether configuration space of function `rid`, which exists, is registers only: they change by writes to
    /// configuration space alone, and reading them has no effect. Virtio's window into the BARs is more than that while
    /// a driver uses it (`virtio 1.4 §4.1.4.9`).
    fn config_is_static(&self, rid: Rid) -> bool;

    /// The state of a function: the device's own for `None`, or a reserved VF. `None` where there is no such function,
    /// or no driver can have it.
    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus>;

    /// Which VFs exist; `None` for a device that is no PF.
    fn sriov_status(&self) -> Option<SriovStatus>;

    /// The port of a function that has one.
    fn port(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn Port>;

    /// Calls `observer` from now on when a function asks its driver for a reset. The first observer stays. It is called
    /// on any thread, also with the device's lock held.
    fn observe_needs_reset(&self, _observer: &Arc<NeedsResetObserver>) {}

    /// Appends the backends that reach the guest's memory by themselves, with the functions that they are behind. VFs
    /// that do not exist now have them, too.
    fn memory_users(&self, out: &mut Vec<(Option<VfIndex>, MemoryUser)>);
}

/// What the host does with a device while a guest has it.
pub trait Lifecycle {
    /// Stops all queues, and keeps them stopped until [`Self::resume`], whatever the registers say. No register changes
    /// and no queue loses its position. Accesses still work, resets too. A second pause does nothing.
    fn pause(&mut self) -> Outcome;

    /// Starts the queues that the registers want to run, from where they stood. A function whose queues the host cannot
    /// start stays paused, and [`Self::take_not_resumed`] says so; others go on.
    fn resume(&mut self) -> Outcome;

    /// As [`Self::pause`], of one function: the device's own for `None`, or a VF. Nothing if there is no such function.
    fn pause_function(&mut self, _vf: Option<VfIndex>) -> Outcome {
        Outcome::none()
    }

    /// As [`Self::resume`], of one function.
    fn resume_function(&mut self, _vf: Option<VfIndex>) -> Outcome {
        Outcome::none()
    }

    /// Gives a network function whose backend is missing or lost `new`. It is paused, and its workers have ended. What
    /// it had before is left in `new`, to be dropped without the device's lock.
    ///
    /// # Errors
    ///
    /// Nothing has changed then.
    fn connect(&mut self, _vf: Option<VfIndex>, _new: &mut NewBackend) -> Result<(), ConnectError> {
        Err(ConnectError::NoNic)
    }

    /// A function that the last [`Self::resume`] left paused, if there is one.
    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        None
    }

    /// The state of a device that is paused and whose workers have ended; `None` if no driver can change anything of
    /// it.
    ///
    /// # Errors
    ///
    /// [`StateError::Running`], when a queue runs or its worker has not ended.
    fn save(&self) -> Result<Option<DeviceState>, StateError>;

    /// Brings a device that is paused, or whose queues never ran, to `state`, and leaves it paused. VFs that `state`
    /// says are enabled are enabled, and not reset; queues go on from where they stood once the device is resumed.
    /// Afterwards the caller reconciles as after a reset.
    ///
    /// # Errors
    ///
    /// [`StateError::Running`], when a queue runs: nothing has changed. Any other [`StateError`], when the state is of
    /// another device, or one that no driver could have brought it to: the device is paused in its state of power-on.
    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError>;
}

/// All effects of queues that started or stopped in the functions in `reach`.
pub(crate) fn queues_changed(reach: Reach, stopping: Vec<Thread>) -> Outcome {
    Outcome { effects: Effects::QUEUES, reach, stopping }
}

/// A host bridge has no queues, and no registers to write.
impl<S> Signals for HostBridge<S> {
    fn doorbells(&self, _reach: Reach, _out: &mut Vec<Doorbell>) {}

    fn messages(&self, _reach: Reach, _out: &mut Vec<Message>) {}

    fn observe_doorbells(&self, _observer: &Arc<DoorbellObserver>) {}
}

impl<S> Inspect for HostBridge<S> {
    fn config_is_static(&self, _rid: Rid) -> bool {
        true
    }

    fn function_status(&self, _vf: Option<VfIndex>) -> Option<FunctionStatus> {
        None
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        None
    }

    fn port(&mut self, _vf: Option<VfIndex>) -> Option<&mut dyn Port> {
        None
    }

    fn memory_users(&self, _out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {}
}

impl<S> Lifecycle for HostBridge<S> {
    fn pause(&mut self) -> Outcome {
        Outcome::none()
    }

    fn resume(&mut self) -> Outcome {
        Outcome::none()
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Ok(None)
    }

    fn restore(&mut self, _state: &DeviceState) -> Result<(), StateError> {
        Err(StateError::Shape("functions"))
    }
}

/// Memory that the guest is to find in a window.
#[derive(Debug, Clone)]
pub struct MemoryArea {
    /// The window.
    pub window: WindowId,
    /// Where the memory begins in it, a multiple of the page size.
    pub offset: u64,
    /// The memory, a multiple of the page size.
    pub memory: Arc<FileMapping>,
    /// Who reaches it beside the guest.
    pub peers: Option<Arc<dyn MemoryPeers>>,
}

/// Devices that reach another device's memory at the guest's addresses, as long as the guest finds it there.
pub trait MemoryPeers: fmt::Debug + Send + Sync {
    /// Lets them reach `memory` at `address`. Those that cannot work without.
    fn map(&self, address: u64, memory: &Arc<FileMapping>);

    /// Takes it back. When this returns, none of them reaches it there.
    fn unmap(&self, address: u64, memory: &Arc<FileMapping>);
}

/// A guest's write to `offset` of `window`, of whatever value, signals `eventfd`.
#[derive(Debug, Clone)]
pub struct Doorbell {
    /// The function whose queue it is.
    pub function: Rid,
    /// The window that the doorbell lies in.
    pub window: WindowId,
    /// The offset of its first byte in that window.
    pub offset: u64,
    /// What a write to it signals. Several doorbells may share one.
    pub eventfd: Arc<EventFd>,
    /// A page that the guest may be given in its place. Then `offset` starts a page with nothing but this doorbell in
    /// it.
    pub page: Option<Arc<DoorbellPage>>,
}

/// An interrupt pin, whose level the device holds until it is served.
#[derive(Debug, Clone)]
pub struct Pin {
    /// A signal asserts it.
    pub trigger: Arc<EventFd>,
    /// It is signalled when the guest has ended the interrupt, which deasserts the pin. A device that still wants to be
    /// served then signals `trigger` again. A signal too many is harmless.
    pub resample: Arc<EventFd>,
}

/// A function that stays paused, because the host lacks something.
#[derive(Debug)]
pub struct NotResumed {
    /// Which VF; `None` for the device's own function.
    pub vf: Option<VfIndex>,
    /// What the host lacks.
    pub error: io::Error,
}

/// Hears that the doorbells of a function changed.
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
    /// What sends it.
    pub eventfd: Arc<EventFd>,
}
