//! A device that its slot and the oracle share.

use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use pci::{BarIndex, Device, Dword, DwordWrite, Effects, Placement, ResetKind, Rid, Window, WindowId};
use virtio_devices::{Doorbell, Message, VirtioPci};
use vmm_sys_util::eventfd::EventFd;

/// How many devices there can be, and how many functions one can have.
const DEVICES: usize = 3;
const FUNCTIONS: usize = 6;
/// Where the registers of each function have its doorbells.
pub const DOORBELLS_AT: u64 = 0x1000;
/// The distance between VFs' doorbells. A real device's is the slice's, which grows with the page size.
pub const DOORBELLS_STEP: u64 = 0x2000;

/// Two eventfds, of which a function's doorbell signals one or the other.
type Pair = [Arc<EventFd>; 2];

/// Those of all functions, made once, because making them takes longer than what an input does to them.
static EVENTFDS: LazyLock<[[Pair; FUNCTIONS]; DEVICES]> = LazyLock::new(|| {
    let pair = || [(); 2].map(|()| Arc::new(EventFd::new(0).expect("an eventfd")));
    [(); DEVICES].map(|()| [(); FUNCTIONS].map(|()| pair()))
});

/// The device and, because it runs no queues whose doorbells they would be, doorbells that follow from its registers: at the
/// same place of each function, of one eventfd while the function may send messages, and of another while it may not.
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
        self.messages(&mut messages);
        messages
    }

    /// The routing ID of a function: 0 is the PF, 1 its first VF.
    pub fn rid(&self, function: u16) -> Rid {
        match (function.checked_sub(1), self.placement.vfs) {
            (Some(vf), Some(vfs)) => self.placement.rid.wrapping_add(vfs.first_vf_offset + vf),
            _ => self.placement.rid,
        }
    }

    /// What a function's doorbell signals now.
    pub fn doorbell(&self, function: u16) -> Arc<EventFd> {
        let sends = self.sent().iter().any(|message| message.requester == self.rid(function));
        Arc::clone(&self.eventfds[usize::from(function)][usize::from(sends)])
    }
}

impl Device for Shared {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.device.lock().config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Effects {
        self.device.lock().config_write(rid, reg, write)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.device.lock().mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Effects {
        self.device.lock().mmio_write(window, offset, data)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.device.lock().windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Effects {
        self.device.lock().reset(kind)
    }
}

impl VirtioPci for Shared {
    fn doorbells(&self, out: &mut Vec<Doorbell>) {
        for function in 0..=self.num_visible() {
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

    fn vf_at(&self, window: WindowId, offset: u64) -> Option<Rid> {
        self.device.lock().vf_at(window, offset)
    }

    fn vf_wants(&self, rid: Rid, doorbells: &mut Vec<Doorbell>, messages: &mut Vec<Message>) {
        let mut all = Vec::new();
        self.doorbells(&mut all);
        doorbells.extend(all.into_iter().filter(|doorbell| doorbell.function == rid));
        self.device.lock().vf_wants(rid, &mut Vec::new(), messages);
    }

    fn messages(&self, out: &mut Vec<Message>) {
        self.device.lock().messages(out);
    }

    fn num_visible(&self) -> u16 {
        self.device.lock().num_visible()
    }

    fn config_is_static(&self, rid: Rid) -> bool {
        self.device.lock().config_is_static(rid)
    }

    fn take_stopping(&mut self) -> Vec<JoinHandle<()>> {
        self.device.lock().take_stopping()
    }
}
