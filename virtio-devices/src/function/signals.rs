//! A function's signals: the doorbells that it takes, and the messages that it sends.

use std::sync::Arc;

use pci::{Msix, Reach, WindowId};

use super::VirtioFunction;
use super::layout::{MEMORY_BAR, REGISTERS_BAR};
use super::run::Run;
use crate::{Doorbell, DoorbellObserver, MemoryArea, Message, Signals, VirtioDevice};

impl<D: VirtioDevice> VirtioFunction<D> {
    /// Appends the doorbells of the running queues. The function's registers are at `base` of `window`.
    pub(crate) fn doorbells_at(&self, window: WindowId, base: u64, out: &mut Vec<Doorbell>) {
        let pages = self.device.doorbell_pages();
        out.extend(self.run.iter().flat_map(Run::doorbells).map(|(queue, eventfd)| Doorbell {
            function: self.rid,
            window,
            offset: base.saturating_add(self.layout.doorbell(queue)),
            eventfd: Arc::clone(eventfd),
            page: pages.and_then(|pages| pages.get(queue)),
        }));
    }

    /// Appends the messages that the function may send.
    pub(crate) fn sendable(&self, out: &mut Vec<Message>) {
        let interrupts = self.transport.interrupts();
        out.extend((0..self.config.msix().map_or(0, Msix::vectors)).filter_map(|vector| {
            let (address, data) = self.message(vector)?;
            Some(Message { requester: self.rid, address, data, eventfd: interrupts.eventfd(vector)? })
        }));
    }

    /// The address and data of `vector`, if the function may send its message now.
    pub(super) fn message(&self, vector: u16) -> Option<(u64, u32)> {
        self.config.message(vector).filter(|_| self.may_signal())
    }

    /// True if the function may send messages, as far as its own registers say.
    pub(super) fn may_signal(&self) -> bool {
        // Before its queues first run, a device sends nothing. So all its vectors are wired at once at that time, not
        // one by one while the driver sets them up.
        self.run.is_some() && self.config.bus_master()
    }

    /// True if the function is within `reach`.
    pub(super) fn is_in(&self, reach: Reach) -> bool {
        reach == Reach::Device || reach == Reach::Function(self.rid)
    }
}

impl<D: VirtioDevice> Signals for VirtioFunction<D> {
    fn doorbells(&self, reach: Reach, out: &mut Vec<Doorbell>) {
        if self.is_in(reach) {
            self.doorbells_at(WindowId::Bar(REGISTERS_BAR), 0, out);
        }
    }

    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        if self.is_in(reach) {
            self.sendable(out);
        }
    }

    fn memory(&self, out: &mut Vec<MemoryArea>) {
        let window = WindowId::Bar(MEMORY_BAR);
        out.extend(self.device.memory().map(|memory| MemoryArea {
            window,
            offset: 0,
            memory: Arc::clone(memory),
            peers: None,
        }));
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        if let Some(pages) = self.device.doorbell_pages() {
            let (rid, observer) = (self.rid, Arc::clone(observer));
            pages.observe(Box::new(move || observer(rid)));
        }
    }
}
