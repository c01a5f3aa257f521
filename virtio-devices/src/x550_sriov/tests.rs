//! An X550 with drivers that write registers, and a data path that only notes what is to run.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pci::{BarIndex, Effects};
use x550::{Direction, Doorbell, MSIX_BAR, Model, Nic, REGISTERS_BAR, VF_MSIX_BAR};

use super::*;
use crate::testing::{Hosted, memory};
use crate::{DeviceState, Lifecycle};

type Card = Hosted<X550Sriov>;

const PF: Rid = Rid::from_bits(3 << 3);
const MAC: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u16 = 0x160;
/// Bytes of a VF's slice of each of its BARs.
const SLICE: u64 = 0x4000;
/// Enable, in the control registers of queues.
const ENABLE: u32 = 1 << 25;

/// A call of the device to its data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Queues,
    Pools,
    Moderation,
    Doorbell(Doorbell),
    Pause,
    Resume,
}

/// A data path that moves nothing. It notes its calls, and which queues run.
#[derive(Debug, Default)]
struct NoPath {
    calls: Mutex<Vec<Call>>,
    running: Mutex<BTreeSet<(Direction, u16)>>,
    /// Resuming fails.
    refuses: AtomicBool,
}

impl NoPath {
    fn note(&self, call: Call) {
        self.calls.lock().push(call);
    }

    fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut *self.calls.lock())
    }

    fn running(&self) -> Vec<(Direction, u16)> {
        self.running.lock().iter().copied().collect()
    }

    /// Starts and stops queues, and returns the end of each that stopped.
    fn follow(&self, nic: &X550Handle) -> Vec<Thread> {
        let registers = nic.lock();
        let may_run = |queue| nic.may_run(registers.owner(queue).0);
        let is_on = |(direction, queue)| match direction {
            Direction::Receive => registers.receive_queue(queue).enabled,
            Direction::Transmit => registers.transmit_queue(queue).enabled,
        };
        let queues = (0..128).flat_map(|queue| [(Direction::Receive, queue), (Direction::Transmit, queue)]);
        let now: BTreeSet<_> = queues.filter(|(_, queue)| may_run(*queue)).filter(|queue| is_on(*queue)).collect();
        let before = std::mem::replace(&mut *self.running.lock(), now.clone());
        before.difference(&now).map(|(_, queue)| Thread::of_end(format!("queue {queue}"), || {})).collect()
    }
}

impl DataPath for NoPath {
    fn queues_changed(&self, nic: &X550Handle) -> Vec<Thread> {
        self.note(Call::Queues);
        self.follow(nic)
    }

    fn pools_changed(&self, nic: &X550Handle) {
        self.note(Call::Pools);
        // The NIC is free.
        drop(nic.lock());
    }

    fn moderation_changed(&self, _nic: &X550Handle) {
        self.note(Call::Moderation);
    }

    fn doorbell(&self, nic: &X550Handle, doorbell: Doorbell) {
        drop(nic.lock());
        self.note(Call::Doorbell(doorbell));
    }

    fn pause(&self, nic: &X550Handle) -> Vec<Thread> {
        self.note(Call::Pause);
        self.follow(nic)
    }

    fn resume(&self, nic: &X550Handle) -> io::Result<()> {
        self.note(Call::Resume);
        if self.refuses.load(Ordering::Acquire) {
            return Err(io::Error::other("no threads left"));
        }
        drop(self.follow(nic));
        Ok(())
    }

    fn is_running(&self) -> bool {
        !self.running.lock().is_empty()
    }
}

fn placement(total_vfs: u16) -> Placement {
    let vfs = VfPlacement { total_vfs, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    Placement { segment: 0, rid: PF, vfs: (total_vfs > 0).then_some(vfs) }
}

fn spec(total_vfs: u16) -> X550Spec {
    X550Spec { id: "nic".to_string(), model: Model::X550, mac: MAC, total_vfs }
}

/// An X550 at power-on, and its data path.
fn device(total_vfs: u16) -> (Card, Arc<NoPath>) {
    model(Model::X550, total_vfs)
}

/// A NIC of any model at power-on, and its data path.
fn model(model: Model, total_vfs: u16) -> (Card, Arc<NoPath>) {
    let path = Arc::new(NoPath::default());
    let spec = X550Spec { model, ..spec(total_vfs) };
    let device = X550Sriov::new(spec, placement(total_vfs), &memory(), path.clone()).unwrap();
    (Hosted::new(device), path)
}

/// With VFs enabled, in 64 pools of two queues, and all functions bus masters.
fn enabled(total_vfs: u16, num_vfs: u16) -> (Card, Arc<NoPath>) {
    let (mut device, path) = device(total_vfs);
    set_master(&mut device, PF, true);
    let _ = enable(&mut device, num_vfs);
    (0..num_vfs).for_each(|index| set_master(&mut device, rid(index), true));
    set_up_pools(&mut device);
    let _ = path.take_calls();
    (device, path)
}

fn rid(index: u16) -> Rid {
    Rid::from_bits(0x100 + index)
}

fn write_config(device: &mut Card, rid: Rid, offset: u16, value: u32) -> pci::Outcome<std::convert::Infallible> {
    device.config_write(rid, Dword::containing(offset), DwordWrite::full(value))
}

fn read_config(device: &Card, rid: Rid, offset: u16) -> u32 {
    device.config_read(rid, Dword::containing(offset))
}

fn set_master(device: &mut Card, rid: Rid, on: bool) {
    let _ = write_config(device, rid, 4, if on { 6 } else { 2 });
}

/// Sets NumVFs, then VF Enable and VF MSE, as Linux does.
fn enable(device: &mut Card, num_vfs: u16) -> Effects {
    let _ = write_config(device, PF, SRIOV + 0x10, num_vfs.into());
    write_config(device, PF, SRIOV + 8, 9).effects
}

fn disable(device: &mut Card) -> Effects {
    write_config(device, PF, SRIOV + 8, 0).effects
}

/// Initiate Function Level Reset.
fn flr(device: &mut Card, rid: Rid) {
    let _ = write_config(device, rid, 0xa8, 1 << 15);
}

/// The window of a BAR of a function, and the function's place in it.
fn window(place: Place, bar: BarIndex) -> (WindowId, u64) {
    match place {
        Place::Pf => (WindowId::Bar(bar), 0),
        Place::Vf(index) => (WindowId::VfBar(bar), SLICE * u64::from(index)),
    }
}

fn read_bar(device: &mut Card, place: Place, bar: BarIndex, offset: u64) -> u32 {
    let ((window, base), mut data) = (window(place, bar), [0; 4]);
    device.mmio_read(window, base + offset, &mut data);
    u32::from_le_bytes(data)
}

fn write_bar(device: &mut Card, place: Place, bar: BarIndex, offset: u64, value: u32) -> Effects {
    let (window, base) = window(place, bar);
    device.mmio_write(window, base + offset, &value.to_le_bytes()).effects
}

fn read(device: &mut Card, place: Place, offset: u64) -> u32 {
    read_bar(device, place, REGISTERS_BAR, offset)
}

fn write(device: &mut Card, place: Place, offset: u64, value: u32) -> Effects {
    write_bar(device, place, REGISTERS_BAR, offset, value)
}

/// 64 pools of two queues; the NIC receives and sends.
fn set_up_pools(device: &mut Card) {
    for (offset, value) in [(0x11050, 3), (0x51b0, 1), (0x3000, 1), (0x4a80, 1)] {
        let _ = write(device, Place::Pf, offset, value);
    }
}

fn msix_bar(place: Place) -> BarIndex {
    if place == Place::Pf { MSIX_BAR } else { VF_MSIX_BAR }
}

fn rid_of(place: Place) -> Rid {
    match place {
        Place::Pf => PF,
        Place::Vf(index) => rid(index),
    }
}

/// Fills `vectors` entries of a function's MSI-X table and enables MSI-X. The data of a message is its vector.
fn set_up_msix(device: &mut Card, place: Place, vectors: u32) {
    for vector in 0..vectors {
        for (offset, value) in [(0, 0xfee0_0000), (8, vector), (12, 0)] {
            let _ = write_bar(device, place, msix_bar(place), u64::from(16 * vector + offset), value);
        }
    }
    let _ = write_config(device, rid_of(place), 0x70, 0x8000_0000);
}

/// The mailbox interrupts of the PF by vector 5, and of a VF by vector 2.
fn set_up_mailbox(device: &mut Card, place: Place) {
    let registers = if place == Place::Pf { [(0xa00, 0x8500), (0x880, 1 << 19)] } else { [(0x140, 0x82), (0x108, 4)] };
    for (offset, value) in registers {
        let _ = write(device, place, offset, value);
    }
}

/// The messages that a function may send now.
fn messages(device: &Card, reach: Reach) -> Vec<Message> {
    let mut messages = Vec::new();
    device.messages(reach, &mut messages);
    messages
}

/// The vectors of a function whose messages were sent since the last call.
fn arrived(device: &Card, place: Place) -> Vec<u32> {
    let messages = messages(device, Reach::Function(rid_of(place)));
    assert!(messages.iter().all(|message| message.requester == rid_of(place) && message.address == 0xfee0_0000));
    messages.iter().filter(|message| message.eventfd.read().is_ok()).map(|message| message.data).collect()
}

/// The first 32 pending bits of a function.
fn pending(device: &mut Card, place: Place) -> u32 {
    read_bar(device, place, msix_bar(place), 0x2000)
}

/// The status of a function's driver, and the cause of its last reset.
fn driver(device: &Card, vf: Option<u16>) -> (Status, ResetBy) {
    let status = device.function_status(vf.map(VfIndex)).unwrap();
    (status.driver, status.reset_by)
}

fn is_up(device: &Card, vf: Option<u16>) -> bool {
    driver(device, vf).0.contains(Status::DRIVER_OK)
}

/// Enables both directions of queue 0 of a function, which has set up its rings.
fn start(device: &mut Card, place: Place) {
    let (receive, transmit) =
        if place == Place::Pf { (0xd000 + 63 * 0x40, 0x6000 + 127 * 0x40) } else { (0x1000, 0x2000) };
    for (offset, value) in
        [(receive + 8, 128), (receive + 0x28, ENABLE), (transmit + 8, 128), (transmit + 0x28, ENABLE)]
    {
        let _ = write(device, place, offset, value);
    }
}

/// A NIC as at power-on.
fn fresh() -> Nic {
    Nic::new(Mac(MAC))
}

mod interrupts;
mod life;
mod registers;
mod resets;

#[path = "state_tests.rs"]
mod state;
