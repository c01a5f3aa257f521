//! A device shared by its slot and the oracle.

use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use pci::{BarIndex, Device, Dword, DwordWrite, Placement, Reach, ResetKind, Rid, VfIndex, Window, WindowId};
use virtio_devices::{
    DeviceState, Doorbell, DoorbellObserver, FunctionStatus, HostNic, Inspect, Lifecycle, MemoryUser, Message, Outcome,
    Signals, SriovStatus, StateError, Thread, VirtioPci,
};
use vmm_sys_util::eventfd::EventFd;

/// The numbers of devices, and of functions per device.
const DEVICES: usize = 3;
const FUNCTIONS: usize = 6;
/// The offset of the doorbells in each function's registers.
pub const DOORBELLS_AT: u64 = 0x1000;
/// The distance between the doorbells of VFs. A real device's distance is the slice size, which grows with the page
/// size.
pub const DOORBELLS_STEP: u64 = 0x2000;

/// Two eventfds. A function's doorbell signals one or the other.
type Pair = [Arc<EventFd>; 2];

/// The eventfds of all functions. They are created once, because that takes longer than running an input.
static EVENTFDS: LazyLock<[[Pair; FUNCTIONS]; DEVICES]> = LazyLock::new(|| {
    let pair = || [(); 2].map(|()| Arc::new(EventFd::new(0).expect("an eventfd")));
    [(); DEVICES].map(|()| [(); FUNCTIONS].map(|()| pair()))
});

/// A device with fake doorbells, as it runs no queues. They depend on its registers: each is at the same offset of its
/// function, and signals one eventfd while the function may send messages and the other while it may not.
#[derive(Clone)]
pub struct Shared {
    device: Arc<Mutex<Box<dyn VirtioPci>>>,
    placement: Placement,
    eventfds: &'static [Pair; FUNCTIONS],
}

impl Shared {
    /// The n-th device.
    pub fn new(n: usize, placement: Placement, device: Box<dyn VirtioPci>) -> Self {
        Self { device: Arc::new(Mutex::new(device)), placement, eventfds: &EVENTFDS[n] }
    }

    /// The messages that may be sent.
    pub fn sent(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        self.messages(Reach::Device, &mut messages);
        messages
    }

    /// The routing ID of a function: 0 is the PF, 1 is the first VF.
    pub fn rid(&self, function: u16) -> Rid {
        match (function.checked_sub(1), self.placement.vfs) {
            (Some(vf), Some(vfs)) => self.placement.rid.wrapping_add(vfs.first_vf_offset + vf),
            _ => self.placement.rid,
        }
    }

    /// The eventfd that a function's doorbell should signal now.
    pub fn doorbell(&self, function: u16) -> Arc<EventFd> {
        let sends = self.sent().iter().any(|message| message.requester == self.rid(function));
        Arc::clone(&self.eventfds[usize::from(function)][usize::from(sends)])
    }
}

impl Device for Shared {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.device.lock().config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        self.device.lock().config_write(rid, reg, write)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.device.lock().mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        self.device.lock().mmio_write(window, offset, data)
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.device.lock().may_send(rid)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.device.lock().windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        self.device.lock().reset(kind)
    }
}

impl Signals for Shared {
    fn doorbells(&self, reach: Reach, out: &mut Vec<Doorbell>) {
        let visible = self.sriov_status().map_or(0, SriovStatus::num_visible);
        for function in (0..=visible).filter(|n| [Reach::Device, Reach::Function(self.rid(*n))].contains(&reach)) {
            let bar = BarIndex::ALL[2];
            let (window, offset) = match function.checked_sub(1) {
                Some(vf) => (WindowId::VfBar(bar), u64::from(vf) * DOORBELLS_STEP + DOORBELLS_AT),
                None => (WindowId::Bar(bar), DOORBELLS_AT),
            };
            out.push(Doorbell {
                function: self.rid(function),
                window,
                offset,
                eventfd: self.doorbell(function),
                page: None,
            });
        }
    }

    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        self.device.lock().messages(reach, out);
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        self.device.lock().observe_doorbells(observer);
    }
}

impl Inspect for Shared {
    fn config_is_static(&self, rid: Rid) -> bool {
        self.device.lock().config_is_static(rid)
    }

    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        self.device.lock().function_status(vf)
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        self.device.lock().sriov_status()
    }

    fn host_nic(&mut self, _vf: Option<VfIndex>) -> Option<&mut dyn HostNic> {
        None
    }

    fn memory_users(&self, out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {
        self.device.lock().memory_users(out);
    }
}

impl Lifecycle for Shared {
    fn pause(&mut self) -> Outcome {
        self.device.lock().pause()
    }

    fn resume(&mut self) -> Outcome {
        self.device.lock().resume()
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.device.lock().save()
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.device.lock().restore(state)
    }
}
