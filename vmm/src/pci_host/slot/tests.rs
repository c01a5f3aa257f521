//! A device whose wiring the test sets, on a VM that records its calls.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use pci::VfIndex;
use virtio_devices::{DeviceState, Doorbell, Inspect, Lifecycle, MemoryArea, Message, NewThread, Signals, StateError};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::kvm::MsiRoute;
use crate::pci_host::irq_routes::{MESSAGES, RouteChange};
use crate::pci_host::recording_vm::Refuse::{All, Irqfds, Nothing};
use crate::pci_host::recording_vm::{Record, RecordingVm};

/// The device's wanted wiring, shared with the test.
#[derive(Default)]
struct Says {
    windows: Vec<Window>,
    doorbells: Vec<Doorbell>,
    messages: Vec<Message>,
    memory: Vec<MemoryArea>,
    /// A worker that the device's next write stops.
    stopping: Option<Thread>,
    /// Observer of doorbells that change without an access.
    observer: Option<Arc<DoorbellObserver>>,
    /// Number of resumes that the host refuses from now on.
    refusals: usize,
    /// Number of queries for all of its functions, and for one.
    asked: (usize, usize),
}

struct Fake(Arc<Mutex<Says>>);

/// The device's own function, and a VF whose slice begins at [`SLICE`] of the window.
const PF: Rid = Rid::from_bits(8);
const VF: Rid = Rid::from_bits(0x100);
const SLICE: u64 = 0x1000;

const EFFECTS: Effects = Effects::WINDOWS.and(Effects::MESSAGES).and(Effects::QUEUES);

impl pci::Device for Fake {
    type Stopping = Thread;

    fn config_read(&self, _rid: Rid, _reg: Dword) -> u32 {
        7
    }

    fn config_write(&mut self, rid: Rid, _reg: Dword, _write: DwordWrite) -> Outcome {
        Outcome::from(EFFECTS).within(Reach::Function(rid))
    }

    fn mmio_read(&mut self, _window: WindowId, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn mmio_write(&mut self, _window: WindowId, offset: u64, _data: &[u8]) -> Outcome {
        let reach = if offset < SLICE { Reach::Device } else { Reach::Function(VF) };
        let stopping = self.0.lock().stopping.take();
        Outcome { stopping: stopping.into_iter().collect(), ..Outcome::from(EFFECTS).within(reach) }
    }

    fn may_send(&self, _rid: Rid) -> bool {
        true
    }

    fn windows(&self, out: &mut Vec<Window>) {
        out.extend(&self.0.lock().windows);
    }

    fn reset(&mut self, _kind: ResetKind) -> Outcome {
        EFFECTS.into()
    }
}

impl Signals for Fake {
    fn doorbells(&self, reach: Reach, out: &mut Vec<Doorbell>) {
        let mut says = self.0.lock();
        match reach {
            Reach::Device => says.asked.0 += 1,
            _ => says.asked.1 += 1,
        }
        out.extend(says.doorbells.iter().filter(|doorbell| is_in(doorbell.function, reach)).cloned());
    }

    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        out.extend(self.0.lock().messages.iter().filter(|message| is_in(message.requester, reach)).cloned());
    }

    fn memory(&self, out: &mut Vec<MemoryArea>) {
        out.extend(self.0.lock().memory.iter().cloned());
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        self.0.lock().observer = Some(Arc::clone(observer));
    }
}

fn is_in(rid: Rid, reach: Reach) -> bool {
    reach == Reach::Device || reach == Reach::Function(rid)
}

impl Inspect for Fake {}

impl Lifecycle for Fake {
    fn pause(&mut self) -> Outcome {
        let stopping = self.0.lock().stopping.take();
        Outcome { stopping: stopping.into_iter().collect(), ..EFFECTS.into() }
    }

    fn resume(&mut self) -> Outcome {
        EFFECTS.into()
    }

    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        let mut says = self.0.lock();
        says.refusals = says.refusals.checked_sub(1)?;
        Some(NotResumed { vf: Some(VfIndex(3)), error: io::Error::from_raw_os_error(libc::EMFILE) })
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        Ok(None)
    }

    fn restore(&mut self, _state: &DeviceState) -> Result<(), StateError> {
        Ok(())
    }
}

/// Numbers of commits of routes, irqfds and ioeventfds.
fn counts(record: &Mutex<Record>) -> (usize, usize, usize) {
    let record = record.lock();
    (record.commits, record.irqfds.len(), record.ioeventfds.len())
}

/// The GSIs that have routes, and the data of their messages.
fn routes(record: &Mutex<Record>) -> Vec<(u32, u32)> {
    record.lock().routes.values().map(|route| (route.gsi, route.data)).collect()
}

struct Rig {
    wants: Arc<Mutex<Says>>,
    record: Arc<Mutex<Record>>,
    host: Arc<PciHost>,
    slot: Arc<Slot>,
}

fn rig() -> Rig {
    let (wants, record) = (Arc::default(), Arc::default());
    let host = Arc::new(PciHost::default());
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&record)))));
    let placement = Placement { segment: 0, rid: PF, vfs: None };
    let slot = Slot::new(Box::new(Fake(Arc::clone(&wants))), placement, Arc::clone(&host)).unwrap();
    Rig { wants, record, host, slot }
}

fn eventfd() -> Arc<EventFd> {
    Arc::new(EventFd::new(EFD_NONBLOCK).unwrap())
}

fn message(data: u32) -> Message {
    Message { requester: VF, address: 0xfee0_0000, data, eventfd: eventfd() }
}

fn bar() -> WindowId {
    WindowId::Bar(pci::BarIndex::new(2).unwrap())
}

fn window(base: u64) -> Window {
    Window { id: bar(), base, len: 0x2000, kind: pci::MemoryKind::Memory32 }
}

fn doorbell(offset: u64, eventfd: &Arc<EventFd>) -> Doorbell {
    Doorbell { function: PF, window: bar(), offset, eventfd: Arc::clone(eventfd), page: None }
}

#[test]
fn windows_and_doorbells_follow_the_device() {
    let Rig { wants, record, host, slot } = rig();
    let kick = eventfd();
    let fd = kick.as_raw_fd();
    *wants.lock() = Says {
        windows: vec![window(0x10_0000)],
        doorbells: vec![doorbell(0x1000, &kick), doorbell(0x1004, &kick), doorbell(0x2000, &kick)],
        ..Says::default()
    };
    slot.reconcile();
    // The third lies outside of its window.
    assert_eq!(record.lock().ioeventfds, BTreeSet::from([(fd, 0x10_1000), (fd, 0x10_1004)]));
    wants.lock().windows = vec![window(0x20_0000)];
    slot.reconcile();
    assert_eq!(record.lock().ioeventfds, BTreeSet::from([(fd, 0x20_1000), (fd, 0x20_1004)]));
    assert!(host.mmio.find(0x10_0000).is_none());
    assert!(host.mmio.find(0x20_1fff).is_some());
    *wants.lock() = Says::default();
    slot.reconcile();
    assert!(record.lock().ioeventfds.is_empty());
    assert_eq!(host.mmio.window_count(), 0);
}

#[test]
fn another_eventfd_at_the_same_doorbell_replaces_it() {
    let Rig { wants, record, slot, .. } = rig();
    wants.lock().windows = vec![window(0)];
    for kick in [eventfd(), eventfd()] {
        wants.lock().doorbells = vec![doorbell(0, &kick)];
        slot.reconcile();
        assert_eq!(record.lock().ioeventfds, BTreeSet::from([(kick.as_raw_fd(), 0)]));
    }
}

#[test]
fn messages_that_come_together_are_routed_together() {
    let Rig { wants, record, slot, host } = rig();
    wants.lock().messages = (0..3).map(message).collect();
    slot.reconcile();
    assert_eq!(counts(&record), (1, 3, 0));
    assert_eq!(routes(&record), [(24, 0), (25, 1), (26, 2)]);
    slot.reconcile();
    assert_eq!(counts(&record), (1, 3, 0));
    wants.lock().messages.clear();
    slot.reconcile();
    assert_eq!((counts(&record), host.routes.len()), ((1, 0, 0), 0));
}

#[test]
fn a_masked_vector_keeps_its_route_until_its_eventfd_goes() {
    let Rig { wants, record, slot, host } = rig();
    let vector = message(1);
    for _ in 0..3 {
        wants.lock().messages = vec![vector.clone()];
        slot.reconcile();
        assert_eq!(counts(&record), (1, 1, 0));
        wants.lock().messages.clear();
        slot.reconcile();
        assert_eq!((counts(&record), host.routes.len()), ((1, 0, 0), 1));
    }
    drop(vector);
    slot.reconcile();
    assert_eq!(host.routes.len(), 0);
}

#[test]
fn wired_vector_can_be_masked_and_changed_in_a_full_table() {
    let Rig { wants, record, slot, host } = rig();
    let route = MsiRoute { gsi: 0, address: 0, data: 0, requester: Rid::from_bits(0) };
    let others = RouteChange { add: vec![route; MESSAGES - 1], ..RouteChange::default() };
    host.routes.commit(others, &RecordingVm(Arc::clone(&record))).unwrap();
    let (vector, unlucky) = (message(1), message(2));
    wants.lock().messages = vec![vector.clone()];
    slot.reconcile();
    wants.lock().messages = vec![unlucky.clone()];
    slot.reconcile();
    assert!(record.lock().irqfds.is_empty());
    wants.lock().messages = vec![Message { data: 9, ..vector }, unlucky];
    slot.reconcile();
    assert_eq!((record.lock().irqfds.len(), host.routes.len()), (1, MESSAGES));
    assert_eq!(routes(&record).last(), Some(&(24 + MESSAGES as u32 - 1, 9)));
}

#[test]
fn a_changed_message_keeps_its_gsi() {
    let Rig { wants, record, slot, .. } = rig();
    wants.lock().messages = vec![message(1), message(2)];
    slot.reconcile();
    let before = record.lock().irqfds.clone();
    wants.lock().messages[1].data = 9;
    slot.reconcile();
    assert_eq!(routes(&record), [(24, 1), (25, 9)]);
    assert_eq!(record.lock().commits, 2);
    assert_eq!(record.lock().irqfds, before);
}

#[test]
fn refused_host_calls_are_retried_and_only_done_ones_undone() {
    let Rig { wants, record, slot, host } = rig();
    let (kick, vector) = (eventfd(), message(1));
    record.lock().refuse = All;
    *wants.lock() = Says {
        windows: vec![window(0x1000)],
        doorbells: vec![doorbell(0, &kick)],
        messages: vec![vector.clone()],
        ..Says::default()
    };
    slot.reconcile();
    assert_eq!(host.routes.len(), 0);
    record.lock().refuse = Irqfds;
    slot.reconcile();
    assert_eq!(counts(&record), (1, 0, 1));
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(counts(&record), (1, 1, 1));
    record.lock().refuse = Irqfds;
    wants.lock().messages.clear();
    slot.reconcile();
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(counts(&record), (1, 0, 1));
    record.lock().refuse = All;
    wants.lock().doorbells.clear();
    slot.reconcile();
    record.lock().refuse = Nothing;
    slot.reconcile();
    assert_eq!(counts(&record), (1, 0, 0));
}

#[test]
fn a_new_vm_is_wired_from_the_start() {
    let Rig { wants, record, host, slot } = rig();
    wants.lock().messages = vec![message(1)];
    slot.reconcile();
    host.set_wiring(None);
    slot.forget_wiring();
    *record.lock() = Record::default();
    host.set_wiring(Some(Box::new(RecordingVm(Arc::clone(&record)))));
    slot.reconcile();
    assert_eq!(counts(&record), (1, 1, 0));
}

#[test]
fn as_many_messages_are_routed_as_there_are_routes() {
    let Rig { record, host, .. } = rig();
    let wiring = RecordingVm(record);
    let route = MsiRoute { gsi: 0, address: 0, data: 0, requester: Rid::from_bits(0) };
    let add = |count| RouteChange { add: vec![route; count], ..RouteChange::default() };
    assert_eq!(host.routes.commit(add(4000), &wiring).unwrap().len(), 4000);
    assert_eq!(host.routes.commit(add(57), &wiring).unwrap().len(), 56);
    assert!(host.routes.commit(add(1), &wiring).unwrap().is_empty());
    let remove = RouteChange { remove: vec![30], ..add(1) };
    assert_eq!(host.routes.commit(remove, &wiring).unwrap(), [30]);
}

#[test]
fn a_signal_that_waits_is_passed_on_after_the_wire_is_there() {
    let Rig { wants, record, slot, .. } = rig();
    let vector = message(1);
    vector.eventfd.write(5).unwrap();
    wants.lock().messages = vec![vector.clone()];
    slot.reconcile();
    assert_eq!(counts(&record), (1, 1, 0));
    assert_eq!(vector.eventfd.read().unwrap(), 1, "one signal, made once the wire was there");
}

#[test]
fn a_write_to_a_vf_is_made_good_for_that_vf_alone() {
    let Rig { wants, record, slot, .. } = rig();
    let of_pf = Message { requester: PF, ..message(1) };
    let (kick, pf_kick) = (eventfd(), eventfd());
    let vf_doorbell = Doorbell { function: VF, ..doorbell(SLICE, &kick) };
    *wants.lock() = Says {
        windows: vec![window(0x10_0000)],
        doorbells: vec![doorbell(0, &pf_kick), vf_doorbell],
        messages: vec![of_pf, message(2)],
        ..Says::default()
    };
    slot.reconcile();
    assert_eq!(counts(&record), (1, 2, 2));
    wants.lock().asked = (0, 0);

    // The PF wants nothing now, and has not been queried.
    {
        let mut wants = wants.lock();
        wants.doorbells.clear();
        wants.messages = vec![message(3)];
    }
    slot.mmio_write(bar(), SLICE, &[0]);
    assert_eq!(wants.lock().asked, (0, 1));
    assert_eq!(record.lock().ioeventfds, BTreeSet::from([(pf_kick.as_raw_fd(), 0x10_0000)]));
    assert_eq!(routes(&record), [(24, 1), (25, 3)], "the PF's, and in place of the VF's old one its new one");

    slot.config_write(VF, Dword::containing(4), DwordWrite::full(0));
    assert_eq!(wants.lock().asked, (0, 2));
    slot.mmio_write(bar(), 0, &[0]);
    assert_eq!(wants.lock().asked, (1, 2));
    assert_eq!(counts(&record), (2, 1, 0));
    // A window that has moved in the meantime concerns all functions.
    wants.lock().windows.clear();
    slot.mmio_write(bar(), SLICE, &[0]);
    assert_eq!(wants.lock().asked, (2, 2));
}

#[test]
fn retired_slot_has_released_its_device_while_still_referenced() {
    let Rig { wants, slot, .. } = rig();
    let access = Arc::clone(&slot);
    slot.retire();
    assert_eq!(Arc::strong_count(&wants), 1);
    access.mmio_write(bar(), 0, &[1]);
    let mut data = [0; 4];
    access.mmio_read(bar(), 0, &mut data);
    assert_eq!(data, [0xff; 4]);
    access.config_write(PF, Dword::containing(4), DwordWrite::full(6));
    let nobody = Dword::all().take(4).map(|reg| access.config_read(PF, reg));
    assert_eq!(nobody.collect::<Vec<_>>(), [ALL_ONES; 4], "not even a class");
    assert!(access.with(|_| ()).is_none());
}

#[test]
fn device_stays_reachable_while_an_access_waits_for_a_worker() {
    let Rig { wants, slot, .. } = rig();
    let (sender, receiver) = std::sync::mpsc::channel();
    let reached = Arc::clone(&slot);
    // The worker ends only after another access has completed.
    let worker = NewThread::new("worker", 64 << 10, move || {
        reached.mmio_read(bar(), 0, &mut [0]);
        sender.send(()).unwrap();
    });
    wants.lock().stopping = Some(worker.start().unwrap());
    slot.mmio_write(bar(), 0, &[1]);
    assert_eq!(receiver.try_recv(), Ok(()));
}

mod doorbells;
mod memory;
mod resuming;

#[test]
fn a_pause_that_has_a_deadline_waits_no_longer_for_a_worker() {
    let rig = rig();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    rig.wants.lock().stopping = Some(
        NewThread::new("late", 1 << 16, move || {
            let _ = ends.recv();
        })
        .start()
        .unwrap(),
    );
    let began = Instant::now();
    assert!(!rig.slot.pause_by(began + Duration::from_millis(50)));
    assert!(began.elapsed() >= Duration::from_millis(50));
    end.send(()).unwrap();
    rig.wants.lock().stopping = Some(NewThread::new("soon", 1 << 16, || {}).start().unwrap());
    assert!(rig.slot.pause_by(Instant::now() + Duration::from_secs(60)));
    assert!(rig.slot.pause_by(Instant::now()), "nothing runs");
}
