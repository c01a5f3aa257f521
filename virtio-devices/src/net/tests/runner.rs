//! A NIC whose backend runs the queues: the worker's requests to the backend, and the driver's view.

mod scripted;
mod translated;

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::*;
use virtio_queue::QueueT;

use super::super::counters::Counter;
use super::super::testing::*;
use super::super::{Net, NetError};
use crate::backend::{Ability, Attention};
use crate::{Backend, BackendChange, BackendKind, HostNic, NO_VECTOR, VirtioDevice};
use scripted::{FEATURES, Scripted};

const CONTROL: u16 = 2;

fn config_interrupts(guest: &Guest) -> u64 {
    let vector = guest.interrupts.config_vector();
    guest.interrupts.eventfd(vector).unwrap().read().unwrap_or(0)
}

fn link_up(net: &Net) -> bool {
    let mut status = [0; 2];
    net.config_read(6, &mut status);
    u16::from_le_bytes(status) & VIRTIO_NET_S_LINK_UP as u16 != 0
}

#[test]
fn backend_gets_data_queues_and_worker_keeps_control_queue() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    assert_eq!(backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true").len(), 1);
    let started = backend.script.lock().queues.clone();
    let doorbells = &guest.workers[0].doorbells;
    assert_eq!(doorbells.iter().map(|(queue, _)| *queue).collect::<Vec<_>>(), [0, 1, 2]);
    for (queue, (_, eventfd)) in started.iter().zip(doorbells) {
        assert!(Arc::ptr_eq(&queue.kick, eventfd), "queue {}", queue.index);
        assert_eq!(queue.descriptors.0, guest.queues[usize::from(queue.index)].avail() - 0x8000);
    }
    assert_eq!(guest.workers[0].thread.name(), "_net0_vq0");
    guest.interrupts.eventfd(0).unwrap().read().unwrap_err();
    backend.interrupt(0);
    assert!(guest.interrupts.eventfd(0).unwrap().read().is_ok());
    assert_eq!(guest.command(CONTROL, &[0, 0, 1]), 1, "not negotiated");
    eventually("a count", || guest.count(Counter::ControlRefused) == 1);
    guest.stop();
    assert_eq!(backend.asked(), ["stop"]);
}

#[test]
fn queue_resumes_at_the_backend_position_or_last_used_index() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    // The backend has returned five receive and three transmit buffers, and holds two receive buffers.
    guest.queues[0].write(guest.queues[0].used() + 2, 5u16.to_le_bytes());
    guest.queues[1].write(guest.queues[1].used() + 2, 3u16.to_le_bytes());
    backend.script.lock().positions = vec![Some(7), None];
    guest.stop();
    backend.asked();
    let positions = |guest: &Guest| {
        [0, 1].map(|n: usize| {
            let queue = guest.queues[n].queue.lock();
            (queue.next_avail(), queue.next_used())
        })
    };
    assert_eq!(positions(&guest), [(7, 5), (3, 3)]);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 7), (1, 3)] pairs=1 fresh=false");
}

#[test]
fn a_position_that_no_backend_can_have_reached_is_not_believed() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.queues[0].write(guest.queues[0].used() + 2, 5u16.to_le_bytes());
    guest.queues[1].write(guest.queues[1].used() + 2, 5u16.to_le_bytes());
    // The rings have 16 buffers.
    backend.script.lock().positions = vec![Some(5 + 16), Some(5 + 17)];
    guest.stop();
    let next = [0, 1].map(|n: usize| guest.queues[n].queue.lock().next_avail());
    assert_eq!(next, [21, 5]);
}

#[test]
fn queue_without_vector_sets_isr_until_it_gets_a_vector() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.interrupts.set_queue_vector(1, NO_VECTOR);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    backend.interrupt(1);
    eventually("the ISR status", || guest.interrupts.take_isr() == 1);
    guest.interrupts.set_queue_vector(1, 1);
    guest.workers[0].wake();
    assert_eq!(backend.await_asked("call 1"), ["call 1"]);
    backend.interrupt(1);
    assert!(guest.interrupts.eventfd(1).unwrap().read().is_ok());
    assert_eq!(guest.interrupts.take_isr(), 0);
}

#[test]
fn the_host_s_link_stops_the_queues_and_starts_them_again() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.device.set_link(false).wait().unwrap();
    backend.await_asked("stop");
    assert!(!link_up(&guest.device) && config_interrupts(&guest) == 1);
    guest.device.set_link(true).wait().unwrap();
    assert_eq!(backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true").len(), 1);
    assert!(link_up(&guest.device));
}

/// A guest over `backend` whose link the host has taken down.
fn cut_one_that_could_not_continue(backend: &Scripted) -> Guest {
    backend.script.lock().needs_reset_after_stop = true;
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.device.set_link(false).wait().unwrap();
    guest
}

#[test]
fn backend_that_cannot_resume_keeps_running_while_link_is_down() {
    let backend = Scripted::new(1);
    let mut guest = cut_one_that_could_not_continue(&backend);
    // The worker has handled the link once it has seen a later change.
    guest.interrupts.set_queue_vector(1, NO_VECTOR);
    guest.workers[0].wake();
    assert_eq!(backend.await_asked("call 1"), ["call 1"]);
    assert!(!link_up(&guest.device) && config_interrupts(&guest) == 1);
    guest.device.set_link(true).wait().unwrap();
    assert!(link_up(&guest.device) && config_interrupts(&guest) == 1);
    guest.stop();
    assert_eq!(backend.asked(), ["stop"], "as any other by a pause");
    // Otherwise a driver's first command to a device with the control queue would wait for the link.
    guest.device.set_link(false).wait().unwrap();
    guest.device.reset();
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
}

#[test]
fn lost_backend_that_cannot_resume_recovers_while_link_is_down() {
    let backend = Scripted::new(1);
    let guest = cut_one_that_could_not_continue(&backend);
    backend.say(Err(()));
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=false");
    eventually("the return", || !guest.device.backend_lost());
}

#[test]
fn lost_backend_takes_the_link_down_and_its_return_brings_it_up() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    let changes = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&changes);
    guest.device.observe_backend(Box::new(move |change| seen.lock().push(change)));
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.queues[0].write(guest.queues[0].used() + 2, 5u16.to_le_bytes());
    let generation = guest.device.config_generation();
    backend.script.lock().stays_lost = true;
    backend.say(Err(()));
    eventually("the loss", || guest.device.backend_lost());
    eventually("its interrupt", || config_interrupts(&guest) > 0);
    assert!(!link_up(&guest.device));
    assert_ne!(guest.device.config_generation(), generation);
    // Another attempt follows when the backend signals.
    backend.say(Ok(Attention::Nothing));
    backend.await_asked("recover");
    assert!(guest.device.backend_lost());
    let mut script = backend.script.lock();
    (script.stays_lost, script.says) = (false, None);
    drop(script);
    backend.speaks.write(1).unwrap();
    let asked = backend.await_asked("start [(0, 5), (1, 0)] pairs=1 fresh=false");
    assert_eq!(asked, ["recover", "start [(0, 5), (1, 0)] pairs=1 fresh=false"]);
    eventually("the link", || link_up(&guest.device));
    eventually("both changes", || *changes.lock() == [BackendChange::Lost, BackendChange::Restored]);
}

#[test]
fn a_backend_that_refuses_to_start_is_tried_again() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    backend.script.lock().refuses_start = true;
    guest.start_with(FEATURES);
    eventually("the loss", || guest.device.backend_lost());
    backend.script.lock().refuses_start = false;
    eventually("the return", || !guest.device.backend_lost());
    assert!(backend.asked().contains(&"recover".to_owned()));
}

#[test]
fn invalid_driver_rings_need_a_reset_and_keep_the_backend() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.device.observe_backend(Box::new(|change| panic!("{change:?}")));
    backend.script.lock().refuses_rings = true;
    guest.start_with(FEATURES);
    eventually("the reset request", || guest.interrupts.needs_reset());
    assert!(link_up(&guest.device) && !guest.device.backend_lost());
    // No attempt follows, whatever happens, until the driver resets the device.
    guest.device.set_link(false).wait().unwrap();
    guest.device.set_link(true).wait().unwrap();
    assert_eq!(guest.command(CONTROL, &[0, 0, 1]), 1, "not negotiated, and answered");
    guest.stop();
    assert_eq!(guest.count(Counter::BrokenRings), 1);
    assert_eq!(backend.asked(), ["start [(0, 0), (1, 0)] pairs=1 fresh=true"]);
    backend.script.lock().refuses_rings = false;
    guest.device.reset();
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
}

#[test]
fn the_driver_reads_the_link_that_the_backend_reports() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    for up in [false, true] {
        backend.say(Ok(Attention::Link(up)));
        eventually("the link", || link_up(&guest.device) == up);
        eventually("its interrupt", || config_interrupts(&guest) == 1);
    }
    for _ in 0..2 {
        backend.say(Ok(Attention::BrokenRing));
        eventually("the reset request", || guest.interrupts.needs_reset() && backend.script.lock().says.is_none());
    }
    guest.stop();
    assert_eq!(guest.count(Counter::BrokenRings), 1, "reported once");
}

#[test]
fn backend_follows_pairs_and_offloads_commanded_by_the_driver() {
    let backend = Scripted::new(3);
    let mut guest = backend.guest(3);
    let features = guest.device.features();
    guest.start_with(features);
    backend.await_asked("start [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)] pairs=1 fresh=true");
    assert_eq!(guest.command(6, &[4, 0, 3, 0]), 0);
    backend.await_asked("pairs 3");
    assert_eq!(guest.command(6, &[5, 0, 1 << VIRTIO_NET_F_GUEST_CSUM, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(backend.await_asked("offloads 0x1"), ["offloads 0x1"]);
}

#[test]
fn a_queue_that_makes_no_sense_is_not_given_to_the_backend() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.queues[0].queue.lock().set_used_ring_address(Some(MEMORY as u32 - 8), None);
    guest.start_with(FEATURES);
    backend.await_asked("start [(1, 0)] pairs=1 fresh=true");
    eventually("the reset request", || guest.interrupts.needs_reset());
    eventually("a count", || guest.count(Counter::BrokenRings) == 1);
}

#[test]
fn a_backend_that_can_do_less_than_the_nic_needs_is_refused() {
    let refused = |change: fn(&mut Ability)| {
        let mut backend = Scripted::new(2);
        change(&mut backend.ability);
        Net::new(spec(2, 256), Backend::Runner(Box::new(backend))).map(|_| ()).unwrap_err()
    };
    let name = || "scripted".to_owned();
    assert_eq!(refused(|able| able.queue_pairs = 1), NetError::TooFewPairs { name: name(), pairs: 2, has: 1 });
    assert_eq!(refused(|able| able.queue_size = 128), NetError::TooLarge { name: name(), size: 256, has: 128 });
    assert_eq!(refused(|able| able.features = 0), NetError::Legacy(name()));
}

#[test]
fn the_backend_learns_what_drivers_are_promised() {
    let backend = Scripted::new(1);
    let spec =
        crate::NetSpec { offload_csum: false, offload_tso: false, offload_ufo: false, mtu: Some(1400), ..spec(1, 256) };
    let net = Net::new(spec, Backend::Runner(Box::new(backend.clone()))).unwrap();
    assert_eq!(backend.script.lock().promised, (net.features(), Some(1400)));
}

#[test]
fn control_queue_run_by_backend_is_capped_at_its_queue_size() {
    let control_size = |control_queue, queue_size| {
        let mut backend = Scripted::new(1);
        (backend.ability.control_queue, backend.ability.queue_size) = (control_queue, queue_size);
        *Net::new(spec(1, 16), Backend::Runner(Box::new(backend))).unwrap().queue_sizes().last().unwrap()
    };
    assert_eq!([control_size(true, 32), control_size(false, 32), control_size(true, 256)], [32, 64, 64]);
}

#[test]
fn only_what_the_backend_can_do_is_offered() {
    let offered = |features: u64| {
        let mut backend = Scripted::new(1);
        backend.ability.features = 1 << VIRTIO_F_VERSION_1 | features;
        Net::new(spec(1, 256), Backend::Runner(Box::new(backend))).unwrap().features()
    };
    let bare = offered(0);
    let own =
        1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_STATUS | 1 << VIRTIO_NET_F_SPEED_DUPLEX;
    assert_eq!(bare, own);
    assert_eq!(offered(1 << VIRTIO_NET_F_HOST_TSO4), bare, "segments need checksums");
    assert_eq!(offered(1 << VIRTIO_NET_F_CTRL_RX), bare, "commands need their queue");
    assert_ne!(offered(1 << VIRTIO_NET_F_CTRL_RX | 1 << VIRTIO_NET_F_CTRL_VQ) & 1 << VIRTIO_NET_F_CTRL_VQ, 0);
}

#[test]
fn an_address_of_the_backend_counts_only_if_that_is_a_device() {
    let own = [0x52, 0x54, 0, 0, 0, 9];
    for (kind, expected) in [(BackendKind::VhostUser, spec(1, 16).mac), (BackendKind::Vdpa, own)] {
        let mut backend = Scripted::new(1);
        (backend.ability.kind, backend.ability.mac) = (kind, Some(own));
        let net = Net::new(spec(1, 16), Backend::Runner(Box::new(backend))).unwrap();
        assert_eq!(HostNic::mac(&net), expected);
    }
}

#[test]
fn driver_is_fresh_to_the_backend_until_a_start_succeeds() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    backend.script.lock().refuses_start = true;
    guest.start_with(FEATURES);
    eventually("the loss", || guest.device.backend_lost());
    guest.stop();
    backend.script.lock().refuses_start = false;
    backend.asked();
    // The same driver continues, after a pause.
    guest.start_with(FEATURES);
    let asked = backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    assert_eq!(asked, ["recover", "start [(0, 0), (1, 0)] pairs=1 fresh=true"]);
    guest.stop();
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=false");
}

#[test]
fn buffers_used_before_a_failed_start_are_not_used_twice() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    backend.script.lock().refuses_start = true;
    backend.script.lock().stays_lost = true;
    guest.start_with(FEATURES);
    eventually("the loss", || guest.device.backend_lost());
    guest.queues[0].write(guest.queues[0].used() + 2, 3u16.to_le_bytes());
    backend.asked();
    backend.script.lock().refuses_start = false;
    backend.script.lock().stays_lost = false;
    backend.speaks.write(1).unwrap();
    backend.await_asked("start [(0, 3), (1, 0)] pairs=1 fresh=true");
}

#[test]
fn buffers_used_by_a_lost_backend_are_not_used_twice() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    backend.script.lock().stays_lost = true;
    backend.say(Err(()));
    eventually("the loss", || guest.device.backend_lost());
    // The backend's threads run on until they see that the connection has ended.
    guest.queues[0].write(guest.queues[0].used() + 2, 4u16.to_le_bytes());
    backend.script.lock().stays_lost = false;
    backend.speaks.write(1).unwrap();
    backend.await_asked("start [(0, 4), (1, 0)] pairs=1 fresh=false");
}

#[test]
fn an_mtu_above_the_backend_s_is_refused() {
    let with = |mtu| {
        let mut backend = Scripted::new(1);
        backend.ability.mtu = Some(1500);
        let spec = crate::NetSpec { mtu, ..spec(1, 256) };
        Net::new(spec, Backend::Runner(Box::new(backend))).map(|_| ())
    };
    assert_eq!(with(Some(9000)), Err(NetError::Mtu { name: "scripted".into(), mtu: 9000, has: 1500 }));
    assert_eq!((with(Some(1500)), with(None)), (Ok(()), Ok(())));
}

#[test]
fn new_memory_reaches_a_backend_through_its_current_owner() {
    let backend = Scripted::new(1);
    let mut guest = backend.guest(1);
    guest.device.memory_user().unwrap().set(&memory()).unwrap();
    assert_eq!(backend.asked(), ["memory 1"]);
    let before = guest.device.memory_user().unwrap();
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.device.memory_user().unwrap().set(&memory()).unwrap();
    assert_eq!(backend.asked(), ["memory 1"], "the worker has it, and wakes for it");
    backend.script.lock().refuses_memory = true;
    assert!(guest.device.memory_user().unwrap().set(&memory()).is_err());
    backend.asked();
    guest.stop();
    assert_eq!(backend.asked(), ["stop"], "it continued");
    backend.script.lock().refuses_memory = false;
    before.set(&memory()).unwrap();
    assert_eq!(backend.asked(), ["memory 1"], "the worker has ended");
}

/// A backend without a dirty log stops while its link is held, and continues from its position.
#[test]
fn a_backend_is_stopped_while_its_link_is_held() {
    let backend = Scripted::new(1);
    backend.script.lock().positions = vec![Some(3), Some(5)];
    let mut guest = backend.guest(1);
    let user = guest.device.memory_user().unwrap();
    guest.device.hold_link(true);
    user.stand().unwrap();
    guest.start_with(FEATURES);
    // A driver starts in the meantime.
    guest.device.memory_user().unwrap().stand().unwrap();
    assert!(backend.asked().is_empty() && !guest.device.link_up());
    guest.device.hold_link(false);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    guest.interrupts.take_isr();
    guest.device.hold_link(true);
    guest.device.memory_user().unwrap().stand().unwrap();
    assert_eq!(backend.asked().last().unwrap(), "stop");
    assert_ne!(guest.interrupts.take_isr() & 2, 0, "the driver is notified");
    guest.device.hold_link(false);
    backend.await_asked("start [(0, 3), (1, 5)] pairs=1 fresh=true");
    backend.script.lock().needs_reset_after_stop = true;
    guest.device.hold_link(true);
    let error = guest.device.memory_user().unwrap().stand().unwrap_err();
    assert!(error.to_string().contains("without a reset"), "{error}");
}

/// The queues run in every state of the link, so that a driver that starts while memory is copied would make the
/// backend write there.
#[test]
fn backend_that_cannot_resume_refuses_to_stop_even_when_idle() {
    let backend = Scripted::new(1);
    backend.script.lock().needs_reset_after_stop = true;
    let mut guest = backend.guest(1);
    guest.device.hold_link(true);
    let idle = guest.device.memory_user().unwrap().stand().unwrap_err();
    guest.start_with(FEATURES);
    backend.await_asked("start [(0, 0), (1, 0)] pairs=1 fresh=true");
    let runs = guest.device.memory_user().unwrap().stand().unwrap_err();
    assert!(idle.to_string().contains("without a reset by the driver"), "{idle}");
    assert_eq!(idle.to_string(), runs.to_string());
}
