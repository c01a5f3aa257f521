//! The NIC: an access, from its bytes to the register that it reaches.

use crate::access;
use crate::descriptor::Context;
use crate::effects::{Direction, Effects, Place};
use crate::flow::FlowTable;
use crate::host_interface::{HostInterface, Request};
use crate::interrupts::{Interrupts, Routing};
use crate::mac::Mac;
use crate::mailbox::Mailbox;
use crate::map::END;
use crate::model::Model;
use crate::nvm;
use crate::phy::Phy;
use crate::pool::{Destination, Pool};
use crate::queue::{self, QUEUES, ReceiveQueue, TransmitQueue};
use crate::registers::Registers;
use crate::rss::Rss;
use crate::shape::{BAR0_SIZE, TOTAL_VFS, VF_BAR0_SIZE};
use crate::spec::{self, vf};
use crate::switching::Switching;
use crate::timers::Timers;
use crate::vf::{Vf, alias};

/// The registers of a NIC, which are its only state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    pub(crate) model: Model,
    /// The permanent address.
    pub(crate) mac: Mac,
    /// VFs that exist, as the SR-IOV capability says.
    pub(crate) num_vfs: u16,
    pub(crate) registers: Registers,
    pub(crate) interrupts: Interrupts,
    /// All VFs, existing or not.
    pub(crate) vfs: Vec<Vf>,
    pub(crate) phy: Phy,
    pub(crate) firmware: HostInterface,
    pub(crate) flow_table: FlowTable,
    /// SWSM.
    pub(crate) semaphore: u32,
    /// True from a reset of the PF until CTRL_EXT.PFRSTD is written.
    pub(crate) in_reset: bool,
    /// RTTBCNRC of each transmit queue.
    pub(crate) rates: [u32; 128],
    /// QDE of each receive queue, without the selector.
    pub(crate) drops: [u32; 128],
    /// Contexts of each transmit queue.
    pub(crate) contexts: Box<[[Context; 2]; 128]>,
    /// Moderation of interrupts.
    pub(crate) timers: Timers,
}

/// True if a register at `offset` is one that pools are derived from.
fn concerns_pools(offset: u32) -> bool {
    matches!(
        offset,
        spec::FCTRL
            | spec::HLREG0
            | spec::VLNCTRL
            | spec::MCSTCTRL
            | 0x5180..0x5188
            | spec::VT_CTL
            | 0x51e0..0x51e8
            | 0x5200..0x5480
            | 0x8000..0x8118
            | 0x8200..0x8224
            | 0xa000..0xa800
            | 0xf000..0xf650
            | spec::GCR_EXT
    )
}

/// True if a register at `offset` decides which queues run.
fn concerns_queues(offset: u32) -> bool {
    let in_block = match offset {
        0x1000..0x2000 | 0xd000..0xe000 | 0x6000..0x8000 => offset % spec::QUEUE_LEN == spec::receive::RXDCTL,
        _ => false,
    };
    in_block || matches!(offset, spec::RXCTRL | spec::DMATXCTL | spec::GCR_EXT | 0x51e0..0x51e8 | 0x8110..0x8118)
}

/// True if a register at `offset` is one that RSS follows.
fn concerns_steering(offset: u32) -> bool {
    matches!(
        offset,
        spec::MRQC
            | spec::VT_CTL
            | spec::GCR_EXT
            | 0x3400..0x3500
            | 0x5c00..0x5ca8
            | 0xee80..0xf000
            | 0x1_8000..0x1_a000
    )
}

/// True if `offset` is an interval of a vector.
fn is_throttle(offset: u32) -> bool {
    matches!(offset, 0x820..0x880 | 0x12300..0x124a0)
}

/// The VF of an array of registers that begins at `first` and has `len` bytes for each VF.
fn element(offset: u32, first: u32, len: u32) -> Option<u16> {
    u16::try_from(offset.checked_sub(first)? / len).ok()
}

impl Nic {
    /// The state of an X550 at power-on, with the permanent address `mac`, no VF, and a link that is down.
    pub fn new(mac: Mac) -> Self {
        Self::with_model(Model::X550, mac)
    }

    /// As [`Self::new`], for any model.
    pub fn with_model(model: Model, mac: Mac) -> Self {
        let registers = Registers::new(mac);
        Self {
            model,
            mac,
            num_vfs: 0,
            interrupts: Interrupts::new(),
            vfs: vec![Vf::default(); usize::from(TOTAL_VFS)],
            phy: Phy::default(),
            firmware: HostInterface::new(model),
            flow_table: FlowTable::new(&registers, model),
            registers,
            semaphore: 0,
            in_reset: true,
            rates: [0; 128],
            drops: [0; 128],
            contexts: Box::new([[Context::default(); 2]; 128]),
            timers: Timers::new(),
        }
    }

    /// The product that the NIC is.
    pub fn model(&self) -> Model {
        self.model
    }

    /// The permanent address.
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Sets the number of VFs that exist: NumVFs of the SR-IOV capability, or 0.
    pub fn set_num_vfs(&mut self, num_vfs: u16) -> Effects {
        self.num_vfs = num_vfs.min(TOTAL_VFS);
        Effects::POOLS
    }

    /// Connects or disconnects the link. It keeps its state in every reset.
    pub fn set_link(&mut self, up: bool) -> Effects {
        if up == self.link_is_up() {
            return Effects::NONE;
        }
        self.registers.set(spec::LINKS, if up { spec::LINKS_UP_10G } else { 0 });
        self.raise(spec::EICR_LSC)
    }

    /// True if the link is up.
    pub fn link_is_up(&self) -> bool {
        self.registers.get(spec::LINKS) != 0
    }

    // Accesses.

    /// Reads `data` at `offset` of the BAR 0 of `place`, with the side effects of a read: causes, statistics and events
    /// are cleared. Offsets outside of the BAR read all-ones.
    pub fn read(&mut self, place: Place, offset: u64, data: &mut [u8]) {
        match inside(place, offset) {
            Some(offset) => access::read(offset, data, |at| {
                let value = self.register(place, at);
                self.after_read(place, at);
                value
            }),
            None => data.fill(0xff),
        }
    }

    /// Reads as [`Self::read`], without side effects.
    pub fn peek(&self, place: Place, offset: u64, data: &mut [u8]) {
        match inside(place, offset) {
            Some(offset) => access::read(offset, data, |at| self.register(place, at)),
            None => data.fill(0xff),
        }
    }

    /// Writes `data` at `offset` of the BAR 0 of `place`. Dwords that it does not cover completely are dropped.
    pub fn write(&mut self, place: Place, offset: u64, data: &[u8]) -> Effects {
        let Some(offset) = inside(place, offset) else { return Effects::NONE };
        let mut effects = Effects::NONE;
        for (at, value) in access::written(offset, data) {
            effects = effects.and(match place {
                Place::Pf => self.write_pf(at, value),
                Place::Vf(index) => self.write_vf(index, at, value),
            });
        }
        effects
    }

    /// The dword at `offset`, a multiple of 4, without side effects.
    fn register(&self, place: Place, offset: u32) -> u32 {
        match place {
            Place::Pf => self.pf_register(offset),
            Place::Vf(index) => self.vf_register(index, offset),
        }
    }

    fn pf_register(&self, offset: u32) -> u32 {
        match offset {
            spec::STATUS => self.status(),
            spec::FDIRFREE => self.free_flow_rules(),
            _ if self.model.lacks(offset) => 0,
            spec::EEC => self.registers.get(offset) | self.model.flash_size() << spec::EEC_SIZE_SHIFT,
            spec::VFLRE_0 | spec::VFLREC => self.vf_bits(0, 32, |mailbox| mailbox.vf_reset),
            spec::VFLRE_1 | 0x704 => self.vf_bits(32, 32, |mailbox| mailbox.vf_reset),
            0x710..0x720 => {
                let first = 16 * element(offset, spec::MBVFICR, 4).unwrap_or(0);
                let requests = self.vf_bits(first, 16, |mailbox| mailbox.vf_message);
                requests | self.vf_bits(first, 16, |mailbox| mailbox.vf_acknowledged) << 16
            }
            _ if Interrupts::has(offset) => self.interrupts.peek(offset),
            spec::MSCA | spec::MSRWD => self.phy.peek(offset),
            spec::RTTBCNRC => self.rates.get(self.selected()).copied().unwrap_or(0),
            0x4b00..0x4c00 => self.mailbox(element(offset, spec::PFMAILBOX, 4)).map_or(0, Mailbox::peek_pf),
            spec::SWSM => self.semaphore,
            0x13000..0x14000 => self.buffer(element(offset, spec::PFMBMEM, 64), offset),
            spec::HICR | spec::FWSTS => self.firmware.peek(offset),
            _ if HostInterface::has(offset) => self.firmware.peek(offset),
            _ if offset < END => self.registers.get(offset),
            _ => 0,
        }
    }

    fn vf_register(&self, index: u16, offset: u32) -> u32 {
        let Some(own) = self.vfs.get(usize::from(index)) else { return u32::MAX };
        match offset {
            0x200..0x240 => self.buffer(Some(index), offset),
            vf::VFMAILBOX => own.mailbox.peek_vf(self.in_reset),
            _ if Vf::has(offset) => own.peek(offset),
            _ => {
                let shared = alias(&self.registers, index, offset).filter(|offset| !self.model.lacks(*offset));
                shared.map_or(0, |offset| self.registers.get(offset))
            }
        }
    }

    fn after_read(&mut self, place: Place, offset: u32) {
        match (place, offset) {
            (Place::Pf, spec::SWSM) => self.semaphore |= spec::SWSM_SMBI,
            (Place::Pf, _) => {
                self.interrupts.after_read(offset, self.registers.get(spec::GPIE) & spec::GPIE_OCD != 0);
                self.registers.after_read(offset);
            }
            (Place::Vf(index), _) => {
                let Some(own) = self.vfs.get_mut(usize::from(index)) else { return };
                match offset {
                    vf::VFMAILBOX => own.mailbox.after_vf_read(),
                    _ => own.after_read(offset),
                }
            }
        }
    }

    fn status(&self) -> u32 {
        let master = self.registers.get(spec::CTRL) & spec::CTRL_GIO_DIS == 0;
        let iov = if self.num_vfs > 0 { spec::STATUS_IOV } else { 0 };
        iov | u32::from(self.num_vfs) << spec::STATUS_NUM_VFS_SHIFT | if master { spec::STATUS_GIO } else { 0 }
    }

    /// A bit of each of `count` VFs from `first` on.
    fn vf_bits(&self, first: u16, count: u16, bit: impl Fn(&Mailbox) -> bool) -> u32 {
        let vfs = self.vfs.iter().skip(first.into()).take(count.into());
        (0..).zip(vfs).fold(0, |bits, (n, vf)| bits | u32::from(bit(&vf.mailbox)) << n)
    }

    /// Makes a change of each VF, from `first` on, whose bit is set.
    fn for_bits(&mut self, first: u16, bits: u32, change: impl Fn(&mut Mailbox)) {
        let vfs = self.vfs.iter_mut().skip(first.into()).take(32);
        for (_, vf) in (0..).zip(vfs).filter(|(n, _)| bits >> n & 1 != 0) {
            change(&mut vf.mailbox);
        }
    }

    fn mailbox(&self, index: Option<u16>) -> Option<&Mailbox> {
        self.vfs.get(usize::from(index?)).map(|vf| &vf.mailbox)
    }

    fn buffer(&self, index: Option<u16>, offset: u32) -> u32 {
        let dword = usize::try_from(offset % 64 / 4).ok();
        let mailbox = self.mailbox(index).zip(dword);
        mailbox.and_then(|(mailbox, dword)| mailbox.buffer.get(dword)).copied().unwrap_or(0)
    }

    fn write_buffer(&mut self, index: Option<u16>, offset: u32, value: u32) -> Effects {
        let dword = usize::try_from(offset % 64 / 4).ok();
        let own = index.and_then(|index| self.vfs.get_mut(usize::from(index))).zip(dword);
        if let Some(slot) = own.and_then(|(own, dword)| own.mailbox.buffer.get_mut(dword)) {
            *slot = value;
        }
        Effects::NONE
    }

    fn write_pf(&mut self, offset: u32, value: u32) -> Effects {
        match offset {
            spec::CTRL if value & (spec::CTRL_RST | spec::CTRL_LRST) != 0 => return self.reset_registers(),
            spec::CTRL_EXT => {
                self.registers.write(offset, value);
                self.end_reset(value);
            }
            spec::VFLREC => self.for_bits(0, value, |mailbox| mailbox.vf_reset = false),
            0x704 => self.for_bits(32, value, |mailbox| mailbox.vf_reset = false),
            0x710..0x720 => {
                let first = 16 * element(offset, spec::MBVFICR, 4).unwrap_or(0);
                self.for_bits(first, value & 0xffff, |mailbox| mailbox.vf_message = false);
                self.for_bits(first, value >> 16, |mailbox| mailbox.vf_acknowledged = false);
            }
            _ if Interrupts::has(offset) => {
                let routing = Routing { running: self.running(Place::Pf), ..self.routing() };
                let sent = self.interrupts.write(offset, value, routing);
                return self.messages(Place::Pf, sent);
            }
            spec::MSCA | spec::MSRWD => {
                let up = self.link_is_up();
                self.phy.write(offset, value, up, self.model);
            }
            _ if self.model.lacks(offset) => {}
            spec::EERD | spec::EEWR => self.access_flash(offset, value),
            _ if Self::is_flow_register(offset) => return self.write_flow_register(offset, value),
            spec::QDE => return self.write_drops(value),
            spec::RTTBCNRC => {
                let selected = self.selected();
                if let Some(rate) = self.rates.get_mut(selected) {
                    *rate = value & 0x80ff_ffff;
                }
                return Effects::POOLS;
            }
            0x4b00..0x4c00 => return self.write_mailbox(element(offset, spec::PFMAILBOX, 4), value),
            spec::SWSM => self.semaphore = value & (2 | self.semaphore),
            0x13000..0x14000 => return self.write_buffer(element(offset, spec::PFMBMEM, 64), offset, value),
            _ if offset == spec::HICR || HostInterface::has(offset) => return self.write_firmware(offset, value),
            _ if is_throttle(offset) => {
                self.registers.write(offset, value);
                return self.interval_written(Place::Pf, offset);
            }
            _ => return self.write_storage(offset, value),
        }
        Effects::NONE
    }

    fn write_storage(&mut self, offset: u32, value: u32) -> Effects {
        let changed = self.registers.write(offset, value);
        let doorbell = queue::doorbell(offset);
        Effects {
            doorbell,
            queues: changed && concerns_queues(offset),
            pools: changed && concerns_pools(offset),
            steering: changed && concerns_steering(offset),
            ..Effects::NONE
        }
    }

    fn write_firmware(&mut self, offset: u32, value: u32) -> Effects {
        match self.firmware.write(offset, value) {
            Request::Nothing => Effects::NONE,
            Request::DisableReceive => self.write_storage(spec::RXCTRL, 0),
        }
    }

    /// Runs EERD, or EEWR, which are done at once. Writes of the flash are accepted, and have no effect.
    fn access_flash(&mut self, offset: u32, value: u32) {
        let [low, high, ..] = (value >> 2 & 0x3fff).to_le_bytes();
        let word = match offset {
            spec::EERD => u32::from(nvm::word(self.model, u16::from_le_bytes([low, high]))) << 16,
            _ => value & 0xffff_0000,
        };
        let done = if value & spec::EERD_START == 0 { 0 } else { spec::EERD_DONE | word };
        self.registers.set(offset, value & 0xfffc | done);
    }

    fn write_drops(&mut self, value: u32) -> Effects {
        let [_, queue, ..] = value.to_le_bytes();
        if value & spec::QDE_WRITE == 0 {
            return Effects::NONE;
        }
        if let Some(register) = self.drops.get_mut(usize::from(queue & 0x7f)) {
            *register = value & 3;
        }
        Effects::POOLS
    }

    fn write_mailbox(&mut self, index: Option<u16>, value: u32) -> Effects {
        let masks = self.routing().masks;
        let Some((index, own)) = index.and_then(|index| Some((index, self.vfs.get_mut(usize::from(index))?))) else {
            return Effects::NONE;
        };
        if own.mailbox.write_pf(value) {
            return Effects::send(Place::Vf(index), own.mailbox_event(masks));
        }
        Effects::NONE
    }

    fn write_vf(&mut self, index: u16, offset: u32, value: u32) -> Effects {
        let (masks, running) = (self.routing().masks, self.running(Place::Vf(index)));
        let Some(own) = self.vfs.get_mut(usize::from(index)) else { return Effects::NONE };
        match offset {
            vf::VFCTRL if value & vf::VFCTRL_RST != 0 => self.reset_vf(index),
            0x200..0x240 => self.write_buffer(Some(index), offset, value),
            vf::VFMAILBOX => {
                let causes = if own.mailbox.write_vf(value) { spec::EICR_MAILBOX } else { 0 };
                self.raise(causes)
            }
            _ if Vf::has(offset) => {
                let sent = own.write(offset, value, masks, running);
                match offset {
                    0x820..0x82c => self.interval_written(Place::Vf(index), offset),
                    _ => self.messages(Place::Vf(index), sent),
                }
            }
            _ => match alias(&self.registers, index, offset).filter(|offset| !self.model.lacks(*offset)) {
                Some(offset) => self.write_storage(offset, value),
                None => Effects::NONE,
            },
        }
    }

    // Plain values for a data path.

    /// The value of a pool, 0 to 63.
    pub fn pool(&self, pool: u16) -> Pool {
        Pool::of(&self.registers, &self.rates, &self.drops, pool)
    }

    /// The state of the switch beyond its pools.
    pub fn switching(&self) -> Switching {
        Switching::of(&self.registers)
    }

    /// RSS of a pool, 0 to 63; without virtualization, that of the NIC. [`Effects::steering`] says when to ask again.
    pub fn rss(&self, pool: u16) -> Rss {
        Rss::of(&self.registers, self.model, pool)
    }

    /// Classifies an address for a pool.
    pub fn destination(&self, pool: &Pool, address: Mac) -> Destination {
        Destination::of(&self.registers, pool, address)
    }

    /// The value of a receive queue, 0 to 127.
    pub fn receive_queue(&self, queue: u16) -> ReceiveQueue {
        ReceiveQueue::of(&self.registers, queue)
    }

    /// The value of a transmit queue, 0 to 127.
    pub fn transmit_queue(&self, queue: u16) -> TransmitQueue {
        TransmitQueue::of(&self.registers, queue)
    }

    /// Moves the head of a queue, 0 to 127, from `from` to `to`, as a data path does that used descriptors. Does
    /// nothing if the queue has been disabled or moved in the meantime.
    pub fn advance_head(&mut self, direction: Direction, queue: u16, from: u32, to: u32) {
        let (enabled, head) = match direction {
            Direction::Receive => {
                let queue = self.receive_queue(queue);
                (queue.enabled, queue.head)
            }
            Direction::Transmit => {
                let queue = self.transmit_queue(queue);
                (queue.enabled, queue.head)
            }
        };
        if let (true, Ok(to)) = (enabled && head == from, u16::try_from(to)) {
            self.set_head(direction, queue, to);
        }
    }

    /// Stores a context of transmit queue `queue`, 0 to 127: a queue has two (`Transmit Contexts`).
    pub fn set_context(&mut self, queue: u16, context: Context) {
        if let Some(contexts) = self.contexts.get_mut(usize::from(queue)) {
            let [first, second] = contexts;
            *if context.index & 1 == 0 { first } else { second } = context;
        }
    }

    /// The context of this number, of transmit queue `queue`. All zeros until its driver has sent one.
    pub fn context(&self, queue: u16, index: u8) -> Context {
        let [first, second] = self.contexts.get(usize::from(queue)).copied().unwrap_or_default();
        if index & 1 == 0 { first } else { second }
    }

    /// Sets the head of a queue, 0 to 127, as a data path does that used descriptors.
    pub fn set_head(&mut self, direction: Direction, queue: u16, head: u16) {
        let queue = queue.min(QUEUES - 1);
        let block = match direction {
            Direction::Receive => queue::receive_block(queue),
            Direction::Transmit => queue::transmit_block(queue),
        };
        // RDH and TDH are at the same place.
        self.registers.set(block + spec::transmit::TDH, head.into());
    }

    fn selected(&self) -> usize {
        usize::try_from(self.registers.get(spec::RTTDQSEL) & 0x7f).unwrap_or(0)
    }
}

/// An offset inside of the BAR 0 of `place`.
fn inside(place: Place, offset: u64) -> Option<u32> {
    let size = match place {
        Place::Pf => BAR0_SIZE,
        Place::Vf(_) => VF_BAR0_SIZE,
    };
    u32::try_from(offset).ok().filter(|_| offset < size)
}
