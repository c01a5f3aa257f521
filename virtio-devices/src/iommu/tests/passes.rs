//! Mappings that a request removes are unreachable when it completes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vm_memory::Permissions;

use super::super::mappings::Range;
use super::super::request::Request;
use super::super::{Iommu, IommuAttachment};
use crate::memory::Translate;

const RANGE: Range = Range { first: 0x1000, last: 0x1fff };
const MAP: Request = Request::Map { domain: 1, range: RANGE, target: 0x8000, access: Permissions::ReadWrite };
const UNMAP: Request = Request::Unmap { domain: 1, range: RANGE };

fn attached() -> (Arc<Iommu>, IommuAttachment) {
    let iommu = Iommu::new(48);
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
    iommu.carry_out(Request::Attach { domain: 1, endpoint: 0x100, bypass: false }).unwrap();
    (iommu, attachment)
}

#[test]
fn removing_access_waits_for_a_pass_and_mapping_does_not() {
    let take_away: [fn(&Iommu); 4] = [
        |iommu| iommu.carry_out(UNMAP).unwrap(),
        |iommu| iommu.carry_out(Request::Detach { domain: 1, endpoint: 0x100 }).unwrap(),
        |iommu| iommu.reset(),
        |iommu| {
            iommu.carry_out(Request::Detach { domain: 1, endpoint: 0x100 }).unwrap();
            iommu.set_bypass(false);
        },
    ];
    for take_away in take_away {
        let (iommu, attachment) = attached();
        iommu.carry_out(MAP).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let pass = attachment.endpoint().begin();
            assert!(attachment.endpoint().translate(0x1000, 1, Permissions::Write).is_some());
            let other = Range { first: 0x5000, last: 0x5fff };
            iommu.carry_out(Request::Map { domain: 1, range: other, target: 0, access: Permissions::Read }).unwrap();
            scope.spawn(|| {
                take_away(&iommu);
                done.store(true, Ordering::Release);
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!done.load(Ordering::Acquire), "the pass has not ended");
            drop(pass);
        });
        assert!(done.load(Ordering::Acquire));
        let _pass = attachment.endpoint().begin();
        let found = attachment.endpoint().translate(0x1000, 1, Permissions::Write);
        assert!(found.is_none_or(|(target, _)| target == 0x1000), "at most itself, by bypass");
    }
}

/// A function with a long pass delays its own requests, but no other's.
#[test]
fn an_unmap_does_not_wait_for_a_pass_of_another_function() {
    let (iommu, slow) = attached();
    let other = iommu.add_endpoint(0, pci::Rid::from_bits(0x101));
    iommu.carry_out(Request::Attach { domain: 2, endpoint: 0x101, bypass: false }).unwrap();
    iommu.carry_out(MAP).unwrap();
    iommu.carry_out(Request::Map { domain: 2, range: RANGE, target: 0x8000, access: Permissions::Read }).unwrap();
    let (answered, answer) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let pass = slow.endpoint().begin();
        let first = scope.spawn(|| iommu.carry_out(UNMAP));
        // Its request has been executed, except for the pass.
        while slow.endpoint().mapping(0x1000, Permissions::Read).is_some() {
            thread::yield_now();
        }
        scope.spawn(|| answered.send(iommu.carry_out(Request::Unmap { domain: 2, range: RANGE })));
        let answer = answer.recv_timeout(Duration::from_secs(60));
        assert!(!first.is_finished(), "its own pass has not ended");
        drop(pass);
        assert_eq!((answer, first.join().unwrap()), (Ok(Ok(())), Ok(())));
    });
    drop(other);
}

#[test]
fn a_page_that_was_unmapped_under_traffic_stays_clean() {
    const ROUNDS: u64 = 10_000;
    let (iommu, attachment) = attached();
    // The page's owner: 0 while it has none, otherwise it may be written.
    let (page, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (stale, written) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let pass = attachment.endpoint().begin();
                    if attachment.endpoint().translate(0x1000, 8, Permissions::Write).is_some() {
                        // The time to access the page.
                        (0..20).for_each(|_| std::hint::spin_loop());
                        written.fetch_add(1, Ordering::Relaxed);
                        stale.fetch_add(u64::from(page.load(Ordering::Acquire) == 0), Ordering::Relaxed);
                    }
                    drop(pass);
                    thread::yield_now();
                }
            });
        }
        // On a busy machine, the threads may access a page late.
        let until = Instant::now() + Duration::from_secs(30);
        let is_due = |round| round < ROUNDS || written.load(Ordering::Relaxed) == 0 && Instant::now() < until;
        for round in (0..).take_while(|round| is_due(*round)) {
            page.store(1, Ordering::Release);
            iommu.carry_out(MAP).unwrap();
            // Long enough for a thread to find the page, and to be late.
            (0..round % 100).for_each(|_| std::hint::spin_loop());
            iommu.carry_out(UNMAP).unwrap();
            page.store(0, Ordering::Release);
            (0..100).for_each(|_| std::hint::spin_loop());
        }
        stop.store(true, Ordering::Release);
    });
    let written = written.load(Ordering::Relaxed);
    println!("{ROUNDS} rounds, {written} writes");
    assert_eq!((stale.load(Ordering::Relaxed), written > 0), (0, true));
}

#[test]
fn overlapping_passes_do_not_block_behind_a_waiting_thread() {
    let iommu = Iommu::new(48);
    let attachment = [0x100, 0x101].map(|rid| iommu.add_endpoint(0, pci::Rid::from_bits(rid)));
    let first = attachment[0].endpoint().begin();
    thread::scope(|scope| {
        let _second = attachment[1].endpoint().begin();
        let waits = scope.spawn(|| attachment[1].endpoint().await_passes());
        thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished());
        // Would deadlock behind the waiting thread.
        drop(attachment[1].endpoint().begin());
    });
    drop(first);
}

#[test]
fn a_function_that_is_gone_leaves_its_place_to_its_successor() {
    let (iommu, first) = attached();
    let second = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
    drop(first);
    assert_eq!(iommu.carry_out(Request::Probe { endpoint: 0x100 }), Ok(()));
    drop(second);
    assert!(iommu.carry_out(Request::Probe { endpoint: 0x100 }).is_err());
}
