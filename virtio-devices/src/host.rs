//! What a virtio device asks of the machine it is plugged into.
//!
//! Nothing here is told to the machine as a change. The machine asks what the device wants now, compares it with what it has
//! done so far, and makes the difference good, with the device's lock dropped.

use std::sync::Arc;
use std::thread::JoinHandle;

use pci::{Rid, VfIndex, WindowId};
use vmm_sys_util::eventfd::EventFd;

use crate::{DeviceState, DoorbellPage, FunctionStatus, Port, SriovStatus, StateError};

/// A PCI device with doorbells, messages and queues that run.
pub trait VirtioPci: pci::Device {
    /// Appends the doorbells of all functions whose queues run now.
    fn doorbells(&self, out: &mut Vec<Doorbell>);

    /// Appends the messages that may be sent now: those whose function has MSI-X and Bus Master enabled, of vectors that
    /// neither the vector's mask nor the function's masks.
    ///
    /// A vector that is signalled while it is not in this list keeps the signal in its eventfd, which is its pending bit.
    fn messages(&self, out: &mut Vec<Message>);

    /// The VF that is behind `offset` of `window`, if a write there changes nothing but that VF: neither windows, nor what another
    /// function wants. The machine then asks for that VF alone, instead of for all of them.
    fn vf_at(&self, _window: WindowId, _offset: u64) -> Option<Rid> {
        None
    }

    /// Appends what [`Self::doorbells`] and [`Self::messages`] say of the VF `rid`; of one that does not exist that is nothing.
    fn vf_wants(&self, _rid: Rid, _doorbells: &mut Vec<Doorbell>, _messages: &mut Vec<Message>) {}

    /// Has `observer` told of each function whose doorbells change by themselves from now on, and not by an access. The first one
    /// stays. It is called on threads of the device's own, which hold none of its locks that the other methods need.
    fn observe_doorbells(&self, _observer: &Arc<DoorbellObserver>) {}

    /// How many VFs exist now.
    fn num_visible(&self) -> u16;

    /// Whether configuration space of function `rid`, which exists, is nothing but registers: what it reads changes by writes to
    /// configuration space alone, and reading it has no effect. Virtio's window into the BARs is more than that while a driver
    /// uses it (`virtio 1.4 §4.1.4.9`).
    fn config_is_static(&self, rid: Rid) -> bool;

    /// Takes the queue workers that were told to stop since the last call. The caller joins them, with the device's lock
    /// dropped, before the guest's access that stopped them completes.
    fn take_stopping(&mut self) -> Vec<JoinHandle<()>>;

    /// What a function is doing: the device's own for `None`, or a VF that is reserved. `None` for one that is not.
    fn function_status(&self, _vf: Option<VfIndex>) -> Option<FunctionStatus> {
        None
    }

    /// Which VFs there are; `None` for a device that is no PF.
    fn sriov_status(&self) -> Option<SriovStatus> {
        None
    }

    /// A function's end of its link, for those of [`Self::function_status`] that have one.
    fn port(&mut self, _vf: Option<VfIndex>) -> Option<&mut dyn Port> {
        None
    }

    /// Lets all queues stand still, and keeps them so until [`Self::resume`], whatever the registers say. No register changes and
    /// no queue loses its position; the caller joins what [`Self::take_stopping`] then has, and finds no more doorbells. Accesses
    /// go on to work, resets too. A device that is paused stays so when it is paused again.
    ///
    /// One without queues has nothing to do.
    fn pause(&mut self) {}

    /// Lets the queues run again that the registers want to run, from where they stood. There are doorbells to be found then.
    fn resume(&mut self) {}

    /// The state of a device that is paused and whose workers have ended; none of one that a driver can change nothing of.
    ///
    /// # Errors
    ///
    /// [`StateError::Running`], when it is not paused.
    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Ok(None)
    }

    /// Brings the device to `state`, whatever it was before, and leaves it paused. VFs that `state` says are enabled are enabled, and
    /// not reset; queues go on from where they stood once the device is resumed. As after a reset the caller asks what the device
    /// wants now, and joins the workers that ran before.
    ///
    /// # Errors
    ///
    /// [`StateError`], when the state is of another device, or none that a driver could have brought it to. The device is in its
    /// state of power-on then, and paused.
    fn restore(&mut self, _state: &DeviceState) -> Result<(), StateError> {
        Err(StateError::Shape("functions"))
    }
}

/// A device that does nothing of the sort.
impl VirtioPci for pci::HostBridge {
    fn doorbells(&self, _out: &mut Vec<Doorbell>) {}

    fn messages(&self, _out: &mut Vec<Message>) {}

    fn num_visible(&self) -> u16 {
        0
    }

    fn config_is_static(&self, _rid: Rid) -> bool {
        true
    }

    fn take_stopping(&mut self) -> Vec<JoinHandle<()>> {
        Vec::new()
    }
}

/// A guest's write to `offset` of `window`, of whatever value, signals `eventfd`.
#[derive(Debug, Clone)]
pub struct Doorbell {
    /// The function whose queue it is of.
    pub function: Rid,
    /// The window that the doorbell lies in.
    pub window: WindowId,
    /// The offset of its first byte in that window.
    pub offset: u64,
    /// What a write to it signals. Several doorbells may share one.
    pub eventfd: Arc<EventFd>,
    /// What the guest may be given there instead: `offset` is that of a page then, which has nothing but this doorbell in it.
    pub page: Option<Arc<DoorbellPage>>,
}

/// Is told that the doorbells of a function have changed.
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
