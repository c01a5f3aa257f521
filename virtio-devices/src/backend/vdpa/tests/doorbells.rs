use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VQ;

use super::*;
use crate::Backend;
use crate::backend::DoorbellPages;
use crate::net::testing::Guest;
use crate::testing::driver_queue::eventually;
use crate::{HostNic, VirtioDevice};

fn with_pages() -> Scripted {
    let kernel = Scripted::new(|script| {
        script.features |= 1 << VIRTIO_NET_F_CTRL_VQ;
        script.queue_count = 3;
    });
    kernel.give_doorbells();
    kernel
}

/// True for each of three queues that has a page.
fn given(pages: &DoorbellPages) -> [bool; 3] {
    [0, 1, 2].map(|queue| pages.get(queue).is_some())
}

#[test]
fn a_guest_has_the_doorbells_of_queues_that_run_and_no_others() {
    let kernel = with_pages();
    let mut vdpa = kernel.open().unwrap();
    let pages = vdpa.doorbell_pages().unwrap();
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    pages.observe(Box::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    }));
    assert_eq!((given(&pages), kernel.rung(1)), ([false; 3], 0), "one that does not run is not rung");
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!((given(&pages), told.load(Ordering::Relaxed)), ([true, true, false], 1));
    assert_eq!(kernel.rung(1), 1, "each is rung once, with the index of its queue");
    let page = pages.get(1).unwrap();
    vdpa.stop();
    assert_eq!((given(&pages), told.load(Ordering::Relaxed)), ([false; 3], 2));
    start_with(&mut vdpa, &[queue(1, 0), queue(2, 0)], NEGOTIATED, true).unwrap();
    assert_eq!(given(&pages), [false, true, true]);
    assert_eq!((kernel.rung(1), kernel.rung(2)), (1, 2));
    assert!(Arc::ptr_eq(&page, &pages.get(1).unwrap()), "a device that stays open has the same pages");
}

#[test]
fn a_device_with_pages_for_some_doorbells_only_gives_none() {
    let kernel = with_pages();
    kernel.fail("doorbell 2", 524);
    assert!(kernel.open().unwrap().doorbell_pages().is_none());
}

#[test]
fn a_lost_device_is_closed_and_a_recovered_one_gives_new_pages() {
    let kernel = with_pages();
    let mut vdpa = kernel.open().unwrap();
    let pages = vdpa.doorbell_pages().unwrap();
    start(&mut vdpa, [0, 0], true).unwrap();
    let lost = Arc::downgrade(&pages.get(0).unwrap());
    kernel.fail("probe", libc::EIO);
    vdpa.pulse = Instant::now();
    vdpa.attend().unwrap_err();
    assert_eq!((given(&pages), lost.strong_count()), ([false; 3], 0));
    vdpa.stop();
    kernel.mend();
    vdpa.recover().unwrap();
    assert_eq!(given(&pages), [false; 3]);
    start(&mut vdpa, [0, 0], true).unwrap();
    assert_eq!(given(&pages), [true, true, false]);
    assert!(Arc::ptr_eq(&pages, &vdpa.doorbell_pages().unwrap()));
}

#[test]
fn a_nic_over_it_has_the_pages_while_its_driver_is_up() {
    let kernel = with_pages();
    // The device has no control queue, and accepts positions.
    kernel.0.lock().features &= !(1 << VIRTIO_NET_F_CTRL_VQ);
    let nic = crate::net::testing::spec(1, 128);
    let mut guest = Guest::over(nic, Backend::from(kernel.open().unwrap()));
    assert_eq!(given(guest.device.doorbell_pages().unwrap()), [false; 3]);
    guest.start_with(NEGOTIATED);
    eventually("the start", || given(guest.device.doorbell_pages().unwrap()) == [true, true, false]);
    // A host that takes the link down stops a device that can be resumed after that.
    guest.device.set_link(false).wait().unwrap();
    eventually("the stop", || given(guest.device.doorbell_pages().unwrap()) == [false; 3]);
    guest.device.set_link(true).wait().unwrap();
    eventually("the next start", || given(guest.device.doorbell_pages().unwrap()) == [true, true, false]);
    guest.stop();
    assert_eq!(given(guest.device.doorbell_pages().unwrap()), [false; 3]);
}
