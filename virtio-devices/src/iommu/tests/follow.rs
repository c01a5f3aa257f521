//! A follower always has a copy of a function's mappings.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use parking_lot::Mutex;
use proptest::prelude::*;
use vm_memory::Permissions;

use super::super::mappings::Range;
use super::super::request::Request;
use super::super::status::Status;
use super::super::{Iommu, IommuAttachment};
use super::properties::{PAGE, PAGES, carry_out, iommu, op, seen};
use crate::memory::{DmaFollower, DmaMapping, DmaReach, NotFollowed, Translate};
use crate::testing::driver_queue::eventually;

/// The mappings known to a follower.
enum Known {
    Everything,
    Mapped(BTreeMap<u64, DmaMapping>),
}

/// A follower that can be made to fail.
struct Copied {
    known: Mutex<Known>,
    refuses: AtomicBool,
    removals: Mutex<Vec<Vec<DmaMapping>>>,
}

impl Copied {
    fn of(attachment: &IommuAttachment) -> Arc<Self> {
        let known = Mutex::new(Known::Mapped(BTreeMap::new()));
        let copied = Arc::new(Self { known, refuses: AtomicBool::new(false), removals: Mutex::default() });
        attachment.follow(Arc::clone(&copied) as Arc<dyn DmaFollower>).unwrap();
        copied
    }

    fn accepts(&self) -> Result<(), NotFollowed> {
        if self.refuses.load(Ordering::Relaxed) { Err(NotFollowed) } else { Ok(()) }
    }

    /// The target page of `page`, if `access` is allowed.
    fn at(&self, page: u64, access: Permissions) -> Option<u64> {
        match &*self.known.lock() {
            Known::Everything => Some(page),
            Known::Mapped(mappings) => {
                let (_, mapping) = mappings.range(..=page * PAGE).next_back()?;
                let found = mapping.last >= page * PAGE && mapping.access.allow(access);
                found.then(|| mapping.target / PAGE + page - mapping.first / PAGE)
            }
        }
    }
}

impl DmaFollower for Copied {
    fn mapped(&self, mapping: DmaMapping) -> Result<(), NotFollowed> {
        self.accepts()?;
        let Known::Mapped(mappings) = &mut *self.known.lock() else { panic!("bypassed") };
        assert!(mappings.insert(mapping.first, mapping).is_none());
        Ok(())
    }

    fn unmapped(&self, removed: &[DmaMapping]) {
        let Known::Mapped(mappings) = &mut *self.known.lock() else { panic!("bypassed") };
        let (first, last) = (removed.first().unwrap().first, removed.last().unwrap().last);
        let inside: Vec<_> = mappings.range(first..=last).map(|(_, mapping)| *mapping).collect();
        assert!(inside.iter().all(|mapping| removed.contains(mapping)), "nothing else is between them");
        mappings.retain(|at, _| !(first..=last).contains(at));
        self.removals.lock().push(removed.to_vec());
    }

    fn attached(&self, reach: DmaReach<'_>) -> Result<(), NotFollowed> {
        let (accepts, mut known) = (self.accepts(), self.known.lock());
        *known = Known::Mapped(BTreeMap::new());
        match reach {
            DmaReach::Nothing => {}
            DmaReach::Everything => *known = Known::Everything,
            DmaReach::Mapped(mappings) => {
                accepts?;
                *known = Known::Mapped(mappings.map(|mapping| (mapping.first, mapping)).collect());
            }
        }
        Ok(())
    }
}

fn known(followers: &[Arc<Copied>]) -> Vec<Option<u64>> {
    let pages = followers.iter().flat_map(|follower| (0..2 * PAGES).map(move |page| (follower, page)));
    let both = [Permissions::Read, Permissions::Write];
    pages.flat_map(|(follower, page)| both.map(|access| follower.at(page, access))).collect()
}

proptest! {
    #[test]
    fn follower_tracks_its_functions_mappings_after_each_request(
        ops in prop::collection::vec((op(), prop::bool::weighted(0.1)), 1..60)
    ) {
        let (iommu, attachment) = iommu();
        let followers: Vec<_> = attachment.iter().map(Copied::of).collect();
        for (op, refuses) in ops {
            let last = followers.last().unwrap();
            last.refuses.store(refuses, Ordering::Relaxed);
            let (before, status) = (seen(&attachment), carry_out(&iommu, op));
            let after = seen(&attachment);
            prop_assert_eq!(known(&followers), after.clone(), "{:?}", op);
            if status == Status::NoMemory {
                let attach = format!("{op:?}").starts_with("Attach");
                prop_assert!(refuses && (attach || before == after), "{:?}", op);
            }
        }
    }
}

const RANGE: Range = Range { first: 0x1000, last: 0x1fff };
const MAP: Request = Request::Map { domain: 1, range: RANGE, target: 0x8000, access: Permissions::ReadWrite };
const ATTACH: Request = Request::Attach { domain: 1, endpoint: 0x100, bypass: false };

fn one() -> (Arc<Iommu>, IommuAttachment) {
    let iommu = Iommu::new(48);
    let attachment = iommu.add_endpoint(0, pci::Rid::from_bits(0x100));
    (iommu, attachment)
}

#[test]
fn unmap_reports_all_removals_at_once_after_passes_end() {
    let (iommu, attachment) = one();
    let copied = Copied::of(&attachment);
    iommu.carry_out(ATTACH).unwrap();
    iommu.carry_out(MAP).unwrap();
    let range = Range { first: 0x4000, last: 0x5fff };
    iommu.carry_out(Request::Map { domain: 1, range, target: 0, access: Permissions::Read }).unwrap();
    thread::scope(|scope| {
        let pass = attachment.endpoint().begin();
        let all = Range { first: 0, last: u64::MAX };
        scope.spawn(move || iommu.carry_out(Request::Unmap { domain: 1, range: all }).unwrap());
        eventually("the mapping's removal", || attachment.endpoint().mapping(0x1000, Permissions::Read).is_none());
        assert!(copied.removals.lock().is_empty(), "a thread may be about to pass on what it has looked up");
        drop(pass);
    });
    let removals = copied.removals.lock();
    let firsts = |removed: &Vec<DmaMapping>| removed.iter().map(|mapping| mapping.first).collect::<Vec<_>>();
    assert_eq!(removals.iter().map(firsts).collect::<Vec<_>>(), [[0x1000, 0x4000]]);
}

#[test]
fn map_and_attach_fail_if_the_follower_refuses() {
    let (iommu, attachment) = one();
    let copied = Copied::of(&attachment);
    iommu.carry_out(ATTACH).unwrap();
    copied.refuses.store(true, Ordering::Relaxed);
    assert_eq!(iommu.carry_out(MAP), Err(Status::NoMemory));
    assert_eq!(attachment.endpoint().translate(0x1000, 1, Permissions::Read), None);
    assert_eq!(iommu.table.lock().counts(), (1, 0));
    iommu.carry_out(Request::Attach { domain: 2, endpoint: 0x100, bypass: true }).unwrap();
    assert_eq!(iommu.carry_out(ATTACH), Err(Status::NoMemory));
    assert_eq!(iommu.table.lock().counts(), (0, 0), "it is in no domain");
    assert_eq!(copied.at(7, Permissions::Write), Some(7), "which is bypass");
}

#[test]
fn follower_gets_current_mappings_first_and_none_once_removed() {
    let (iommu, attachment) = one();
    iommu.carry_out(ATTACH).unwrap();
    iommu.carry_out(MAP).unwrap();
    let copied = Copied::of(&attachment);
    assert_eq!((copied.at(1, Permissions::Write), copied.at(2, Permissions::Read)), (Some(8), None));
    attachment.endpoint().follow(None).unwrap();
    iommu.carry_out(Request::Unmap { domain: 1, range: RANGE }).unwrap();
    assert_eq!(copied.at(1, Permissions::Write), Some(8));
    let copied = Copied::of(&attachment);
    drop(attachment);
    assert_eq!(copied.at(1, Permissions::Write), None, "nothing was mapped, and bypass gets no mapping");
}

#[test]
fn an_unmapping_fails_until_each_follower_has_forgotten_it() {
    struct Deaf(AtomicBool);
    impl DmaFollower for Deaf {
        fn mapped(&self, _mapping: DmaMapping) -> Result<(), NotFollowed> {
            Ok(())
        }
        fn unmapped(&self, _mappings: &[DmaMapping]) {}
        fn has_forgotten(&self) -> bool {
            !self.0.load(Ordering::Relaxed)
        }
        fn attached(&self, _reach: DmaReach<'_>) -> Result<(), NotFollowed> {
            Ok(())
        }
    }
    let (iommu, attachment) = one();
    let deaf = Arc::new(Deaf(AtomicBool::new(false)));
    attachment.follow(Arc::clone(&deaf) as Arc<dyn DmaFollower>).unwrap();
    iommu.carry_out(ATTACH).unwrap();
    let unmap = Request::Unmap { domain: 1, range: RANGE };
    iommu.carry_out(MAP).unwrap();
    iommu.carry_out(unmap).unwrap();
    iommu.carry_out(MAP).unwrap();
    deaf.0.store(true, Ordering::Relaxed);
    assert_eq!(iommu.carry_out(unmap), Err(Status::DeviceError));
    assert_eq!(iommu.table.lock().counts().1, 0, "the mapping is gone");
    let Request::Attach { domain, endpoint, .. } = ATTACH else { panic!("{ATTACH:?}") };
    assert_eq!(iommu.carry_out(Request::Detach { domain, endpoint }), Err(Status::DeviceError));
    assert!(iommu.carry_out(ATTACH).is_err(), "it is put into no domain");
    deaf.0.store(false, Ordering::Relaxed);
    iommu.carry_out(ATTACH).unwrap();
}

#[test]
fn the_table_is_free_during_a_call_of_a_follower() {
    struct Slow(Mutex<()>);
    impl DmaFollower for Slow {
        fn mapped(&self, _mapping: DmaMapping) -> Result<(), NotFollowed> {
            drop(self.0.lock());
            Ok(())
        }
        fn unmapped(&self, _mappings: &[DmaMapping]) {}
        fn attached(&self, _reach: DmaReach<'_>) -> Result<(), NotFollowed> {
            Ok(())
        }
    }
    let (iommu, attachment) = one();
    let slow = Arc::new(Slow(Mutex::new(())));
    attachment.follow(Arc::clone(&slow) as Arc<dyn DmaFollower>).unwrap();
    iommu.carry_out(ATTACH).unwrap();
    thread::scope(|scope| {
        let held = slow.0.lock();
        let mapping = scope.spawn(|| iommu.carry_out(MAP));
        while attachment.endpoint().mapping(0x1000, Permissions::Read).is_none() {
            thread::yield_now();
        }
        assert!(!mapping.is_finished());
        assert_eq!(iommu.table.lock().counts(), (1, 1));
        drop(held);
    });
}
