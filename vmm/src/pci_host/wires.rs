//! The wires between a device and its VM. A doorbell is an ioeventfd, and possibly also a page of a host device; a
//! message is an irqfd with a route.
//!
//! The wanted wiring is compared with the existing one, and the difference is made. If the host refuses, the next
//! update of that function tries again, but not every access to the device: a lasting refusal would then make each
//! access a walk over all functions.

use std::collections::BTreeMap;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use pci::{Reach, Rid, Window};
use virtio_devices::{Doorbell, DoorbellPage, Message};
use vmm_sys_util::eventfd::EventFd;

use crate::kvm::MsiRoute;
use crate::pci_host::irq_routes::{RouteChange, Routes};
use crate::pci_host::memory_slots::MemorySlots;
use crate::pci_host::wiring::Wiring;

/// The keys of the functions in `reach` whose second part is `least` to `most`.
fn keys<T: Copy>(reach: Reach, least: T, most: T) -> impl RangeBounds<(Rid, T)> {
    match reach {
        Reach::Device => (Bound::Unbounded, Bound::Unbounded),
        Reach::Function(rid) => (Bound::Included((rid, least)), Bound::Included((rid, most))),
        Reach::Nothing => {
            let none = Rid::from_bits(0);
            (Bound::Included((none, least)), Bound::Excluded((none, least)))
        }
    }
}

/// The wires that some functions of a device want.
#[derive(Default)]
pub(crate) struct Wants {
    /// Their doorbells.
    pub doorbells: Vec<Doorbell>,
    /// Their messages.
    pub messages: Vec<Message>,
}

/// Resources that wires are made of.
pub(crate) struct Tools<'a> {
    /// The routes of the VM.
    pub routes: &'a Routes,
    /// The VM's memory slots for doorbells and devices' memory.
    pub memory_slots: &'a MemorySlots,
    /// The VM.
    pub wiring: &'a dyn Wiring,
    /// Logs what the host refused to do.
    pub complain: &'a dyn Fn(&str, &io::Error),
}

/// A function, and the guest address of its doorbell.
type DoorbellKey = (Rid, u64);
/// A function, and the number of its vector's eventfd.
type MessageKey = (Rid, i32);

/// A message's wire. It keeps its route and its GSI while it is masked, until its eventfd belongs to no vector.
struct Wire {
    eventfd: Arc<EventFd>,
    route: MsiRoute,
    /// True if the eventfd raises `route.gsi`.
    attached: bool,
}

impl Wire {
    fn is(&self, message: &Message) -> bool {
        Arc::ptr_eq(&self.eventfd, &message.eventfd)
    }
}

/// The wires that a device has.
#[derive(Default)]
pub(crate) struct Wires {
    doorbells: BTreeMap<DoorbellKey, Arc<EventFd>>,
    /// The pages over some doorbells, with their memory slots.
    pages: BTreeMap<DoorbellKey, (Arc<DoorbellPage>, u32)>,
    messages: BTreeMap<MessageKey, Wire>,
}

impl Wires {
    /// Updates the wires of the functions in `reach` to `wants`, with `windows` decoded.
    pub(crate) fn update(&mut self, reach: Reach, wants: Wants, windows: &[Window], tools: &Tools<'_>) {
        let doorbells = addresses(windows, wants.doorbells);
        let pages = doorbells.iter().filter_map(|(key, doorbell)| Some((*key, doorbell.page.clone()?))).collect();
        self.hide_pages(reach, &pages, tools);
        self.update_doorbells(reach, doorbells, tools);
        self.show_pages(pages, tools);
        self.update_messages(reach, wants.messages, tools);
    }

    /// Forgets all wires of a former VM.
    pub(crate) fn clear(&mut self) {
        let Self { doorbells, pages, messages } = self;
        doorbells.clear();
        pages.clear();
        messages.clear();
    }

    /// Hides the pages that the guest must no longer have at their addresses. Its writes then go to their eventfds.
    fn hide_pages(&mut self, reach: Reach, wanted: &BTreeMap<DoorbellKey, Arc<DoorbellPage>>, tools: &Tools<'_>) {
        let is_gone = |key: &DoorbellKey, (page, memory_slot): &mut (Arc<DoorbellPage>, u32)| {
            !wanted.get(key).is_some_and(|wanted| Arc::ptr_eq(wanted, page))
                && tools
                    .wiring
                    .show_doorbell(*memory_slot, None)
                    .inspect_err(|error| (tools.complain)("take a doorbell's page from the guest", error))
                    .is_ok()
        };
        let gone = self.pages.extract_if(keys(reach, 0, u64::MAX), is_gone);
        gone.for_each(|(_, (_, memory_slot))| tools.memory_slots.give_back(memory_slot));
    }

    fn show_pages(&mut self, wanted: BTreeMap<DoorbellKey, Arc<DoorbellPage>>, tools: &Tools<'_>) {
        for (key, page) in wanted {
            if self.pages.contains_key(&key) {
                continue;
            }
            // Without a memory slot, or if the host refuses, the doorbell stays an eventfd.
            let Some(memory_slot) = tools.memory_slots.take() else { return };
            match tools.wiring.show_doorbell(memory_slot, Some((key.1, &page))) {
                Ok(()) => drop(self.pages.insert(key, (page, memory_slot))),
                Err(error) => {
                    tools.memory_slots.give_back(memory_slot);
                    (tools.complain)("give the guest a doorbell's page", &error);
                }
            }
        }
    }

    fn update_doorbells(&mut self, reach: Reach, wanted: BTreeMap<DoorbellKey, Doorbell>, tools: &Tools<'_>) {
        let is_stale = |key: &DoorbellKey, eventfd: &mut Arc<EventFd>| {
            !wanted.get(key).is_some_and(|wanted| Arc::ptr_eq(&wanted.eventfd, eventfd))
        };
        // Remove all of them first: another doorbell may have their address next. A doorbell that the host refuses to
        // remove stays.
        let is_gone = |key: &DoorbellKey, eventfd: &mut Arc<EventFd>| {
            is_stale(key, eventfd)
                && tools
                    .wiring
                    .detach_ioeventfd(eventfd, key.1)
                    .inspect_err(|error| (tools.complain)("remove a doorbell", error))
                    .is_ok()
        };
        self.doorbells.extract_if(keys(reach, 0, u64::MAX), is_gone).for_each(drop);
        for (key, Doorbell { eventfd, .. }) in wanted {
            if self.doorbells.contains_key(&key) {
                continue;
            }
            match tools.wiring.attach_ioeventfd(&eventfd, key.1) {
                Ok(()) => drop(self.doorbells.insert(key, eventfd)),
                // The guest's writes are then exits, which signal the same eventfd.
                Err(error) => (tools.complain)("make a doorbell of an address", &error),
            }
        }
    }

    fn update_messages(&mut self, reach: Reach, wanted: Vec<Message>, tools: &Tools<'_>) {
        let key = |message: &Message| (message.requester, message.eventfd.as_raw_fd());
        let wanted: BTreeMap<_, _> = wanted.into_iter().map(|message| (key(&message), message)).collect();
        let remove = self.detach(reach, &wanted, tools);
        let mut change = RouteChange { remove, ..RouteChange::default() };
        let (mut changed, mut new) = (Vec::new(), Vec::new());
        for (key, message) in &wanted {
            match self.messages.get(key) {
                Some(wire) if !wire.is(message) => {}
                Some(wire) if wire.route == route(message, wire.route.gsi) => {}
                Some(wire) => {
                    change.change.push(route(message, wire.route.gsi));
                    changed.push((key, route(message, wire.route.gsi)));
                }
                None => {
                    change.add.push(route(message, 0));
                    new.push((key, message));
                }
            }
        }
        match tools.routes.commit(change, tools.wiring) {
            Ok(gsis) => {
                for (key, route) in changed {
                    self.messages.entry(*key).and_modify(|wire| wire.route = route);
                }
                if gsis.len() < new.len() {
                    let full = io::Error::other("the VM has no more interrupt routes");
                    (tools.complain)("route all interrupts", &full);
                }
                self.messages.extend(gsis.into_iter().zip(new).map(|(gsi, (key, message))| {
                    let eventfd = Arc::clone(&message.eventfd);
                    (*key, Wire { eventfd, route: route(message, gsi), attached: false })
                }));
            }
            Err(error) => (tools.complain)("route interrupts", &error),
        }
        self.attach(&wanted, tools);
    }

    /// Detaches messages that must not be sent now, whose signals stay in their eventfds, and returns the GSIs of
    /// removed vectors.
    fn detach(&mut self, reach: Reach, wanted: &BTreeMap<MessageKey, Message>, tools: &Tools<'_>) -> Vec<u32> {
        let is_gone = |key: &MessageKey, wire: &mut Wire| {
            if wire.attached && !wanted.get(key).is_some_and(|message| wire.is(message)) {
                match tools.wiring.detach_irqfd(&wire.eventfd, wire.route.gsi) {
                    Ok(()) => wire.attached = false,
                    Err(error) => (tools.complain)("detach an interrupt", &error),
                }
            }
            // An eventfd held only by this record belongs to no vector.
            !wire.attached && Arc::strong_count(&wire.eventfd) == 1
        };
        self.messages.extract_if(keys(reach, i32::MIN, i32::MAX), is_gone).map(|(_, wire)| wire.route.gsi).collect()
    }

    /// Attaches the messages that may be sent now and have a route.
    fn attach(&mut self, wanted: &BTreeMap<MessageKey, Message>, tools: &Tools<'_>) {
        for (key, message) in wanted {
            let Some(wire) = self.messages.get_mut(key) else { continue };
            if wire.attached || !wire.is(message) || wire.route != route(message, wire.route.gsi) {
                continue;
            }
            // KVM would send a pending signal at once, but leave it in the eventfd, to be sent again after the next
            // mask.
            let waits = wire.eventfd.read().is_ok();
            match tools.wiring.attach_irqfd(&wire.eventfd, wire.route.gsi) {
                Ok(()) => wire.attached = true,
                Err(error) => (tools.complain)("attach an interrupt", &error),
            }
            if waits {
                // Only a full counter fails, which is a signal.
                let _ = wire.eventfd.write(1);
            }
        }
    }
}

fn route(message: &Message, gsi: u32) -> MsiRoute {
    MsiRoute { gsi, address: message.address, data: message.data, requester: message.requester }
}

/// The guest address of each doorbell whose window is decoded.
fn addresses(windows: &[Window], doorbells: Vec<Doorbell>) -> BTreeMap<DoorbellKey, Doorbell> {
    let address = |doorbell: &Doorbell| {
        let window = windows.iter().find(|window| window.id == doorbell.window)?;
        (doorbell.offset < window.len).then(|| window.base + doorbell.offset)
    };
    let keyed = |doorbell: Doorbell| Some(((doorbell.function, address(&doorbell)?), doorbell));
    doorbells.into_iter().filter_map(keyed).collect()
}
