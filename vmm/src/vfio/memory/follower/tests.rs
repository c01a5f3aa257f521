//! A follower of a virtual IOMMU, over a fake host IOMMU.

use proptest::prelude::*;
use vm_memory::GuestAddress;

use super::*;
use crate::vfio::memory::fake_iommu::{FakeIommu, memory};

const ALL: [(u64, usize); 2] = [(0, 0x10_0000), (1 << 32, 0x10_0000)];

fn follower(fake: &Arc<FakeIommu>) -> (Follower, GuestMap) {
    let memory = memory(&ALL);
    (Follower::new("nic", Arc::clone(fake) as _, &memory).unwrap(), memory)
}

fn host(memory: &GuestMap, address: u64) -> u64 {
    memory.get_host_address(GuestAddress(address)).unwrap() as u64
}

const fn mapping(first: u64, last: u64, target: u64, access: Permissions) -> DmaMapping {
    DmaMapping { first, last, target, access }
}

fn attach(follower: &Follower, mappings: &[DmaMapping]) -> Result<(), NotFollowed> {
    follower.attached(DmaReach::Mapped(&mut mappings.iter().copied()))
}

#[test]
fn follower_reaches_all_memory_then_only_its_domains_mappings() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (follower, memory) = follower(&fake);
    assert_eq!(fake.sorted(), [(0, 0x10_0000), (1 << 32, 0x10_0000)]);
    let first = mapping(0x7f00_0000_0000, 0x7f00_0000_1fff, 0x3000, Permissions::Read);
    attach(&follower, &[first]).unwrap();
    assert_eq!(fake.sorted(), [(0x7f00_0000_0000, 0x2000)]);
    follower.mapped(mapping(0x1000, 0x1fff, (1 << 32) + 0x5000, Permissions::ReadWrite)).unwrap();
    assert_eq!(fake.at(0x7f00_0000_1fff), Some((host(&memory, 0x4fff), Permissions::Read)));
    assert_eq!(fake.at(0x1000), Some((host(&memory, (1 << 32) + 0x5000), Permissions::ReadWrite)));
    follower.unmapped(&[first]);
    assert_eq!(fake.sorted(), [(0x1000, 0x1000)]);
    follower.attached(DmaReach::Nothing).unwrap();
    assert_eq!(fake.sorted(), []);
    follower.attached(DmaReach::Everything).unwrap();
    assert_eq!(fake.at(0x2345), Some((host(&memory, 0x2345), Permissions::ReadWrite)));
    drop(follower);
    assert_eq!(fake.sorted(), []);
}

#[test]
fn mapping_covers_memory_in_it_and_memory_added_later() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (follower, memory) = follower(&fake);
    attach(&follower, &[]).unwrap();
    // A hole after the first memory, a BAR, a mapping without permissions, and the whole address range.
    follower.mapped(mapping(0x1000, 0x2fff, 0xf_f000, Permissions::Write)).unwrap();
    follower.mapped(mapping(0x10_0000, 0x10_0fff, 0xfe00_0000, Permissions::ReadWrite)).unwrap();
    follower.mapped(mapping(0x20_0000, 0x20_0fff, 0, Permissions::No)).unwrap();
    assert_eq!(fake.sorted(), [(0x1000, 0x1000)]);
    let more = GuestMap::clone(&memory)
        .insert_region(Arc::new(
            virtio_devices::GuestRegion::from_range(GuestAddress(0x10_0000), 0x1000, None).unwrap(),
        ))
        .unwrap();
    follower.set_memory(&more).unwrap();
    assert_eq!(fake.at(0x2000), Some((host(&more, 0x10_0000), Permissions::Write)));
    follower.set_memory(&memory).unwrap();
    assert_eq!((fake.at(0x2000), fake.at(0x1000).is_some()), (None, true));
    follower.unmapped(&[mapping(0x1000, 0x2fff, 0xf_f000, Permissions::Write)]);
    assert_eq!(fake.sorted(), []);
    follower.attached(DmaReach::Mapped(&mut [DmaMapping::IDENTITY].into_iter())).unwrap();
    assert_eq!(fake.sorted(), [(0, 0x10_0000), (1 << 32, 0x10_0000)]);
}

#[test]
fn mappings_beyond_the_host_iommu_limit_are_refused_at_request() {
    let fake = FakeIommu::with_most(vec![0..=u64::MAX], 3);
    let (follower, _) = follower(&fake);
    let page = |n: u64| mapping(n << 12, (n << 12) + 0xfff, n << 12, Permissions::ReadWrite);
    attach(&follower, &[page(0), page(1)]).unwrap();
    follower.mapped(page(2)).unwrap();
    assert_eq!(follower.mapped(page(3)), Err(NotFollowed));
    // The request is undone.
    follower.unmapped(&[page(3)]);
    assert_eq!(fake.sorted(), [(0, 0x1000), (0x1000, 0x1000), (0x2000, 0x1000)]);
    follower.unmapped(&[page(1)]);
    follower.mapped(page(3)).unwrap();
    let many: Vec<_> = (0..4).map(page).collect();
    assert_eq!(attach(&follower, &many), Err(NotFollowed));
    assert_eq!((fake.sorted(), follower.refused()), (vec![], 2), "it reaches nothing now");
}

#[test]
fn host_refusal_leaves_the_device_without_the_mappings() {
    let fake = FakeIommu::new(vec![0..=0xffff_ffff_ffff]);
    let (follower, _) = follower(&fake);
    let page = |n: u64| mapping(n << 12, (n << 12) + 0xfff, n << 12, Permissions::ReadWrite);
    assert_eq!(attach(&follower, &[mapping(1 << 48, (1 << 48) + 0xfff, 0, Permissions::Read)]), Err(NotFollowed));
    assert_eq!(fake.sorted(), [], "the host's IOMMU has no such address");
    for calls in 0..2 {
        attach(&follower, &[page(9)]).unwrap();
        *fake.left.lock() = calls + 1;
        assert_eq!(attach(&follower, &[page(1), page(2)]), Err(NotFollowed));
        *fake.left.lock() = usize::MAX;
        assert_eq!(fake.sorted(), []);
    }
    attach(&follower, &[page(1), page(2)]).unwrap();
    *fake.left.lock() = 0;
    follower.unmapped(&[page(1)]);
    assert_eq!(fake.sorted(), [], "what cannot be taken alone is taken with all else");
}

#[test]
fn failed_host_unmap_is_an_error_and_is_retried() {
    let page = mapping(0x1000, 0x1fff, 0x1000, Permissions::ReadWrite);
    let takes: [fn(&Follower); 3] = [
        |follower| assert_eq!(follower.attached(DmaReach::Nothing), Err(NotFollowed)),
        |follower| assert_eq!(follower.attached(DmaReach::Everything), Err(NotFollowed)),
        |follower| follower.unmapped(&[mapping(0x1000, 0x1fff, 0x1000, Permissions::ReadWrite)]),
    ];
    for take in takes {
        let fake = FakeIommu::new(vec![0..=u64::MAX]);
        let (follower, _) = follower(&fake);
        attach(&follower, &[page]).unwrap();
        *fake.is_stuck.lock() = true;
        take(&follower);
        assert_eq!(fake.sorted(), [(0x1000, 0x1000)]);
        *fake.is_stuck.lock() = false;
        follower.attached(DmaReach::Nothing).unwrap();
        assert_eq!(fake.sorted(), []);
    }
}

/// Keeps the log messages.
struct Recorder(Mutex<Vec<String>>);

static RECORDER: Recorder = Recorder(Mutex::new(Vec::new()));

impl log::Log for Recorder {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        self.0.lock().push(record.args().to_string());
    }

    fn flush(&self) {}
}

#[test]
fn repeatable_guest_caused_failures_are_logged_at_powers_of_two() {
    log::set_logger(&RECORDER).unwrap();
    log::set_max_level(log::LevelFilter::Info);
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let follower = Follower::new("often", Arc::clone(&fake) as _, &memory(&ALL)).unwrap();
    let page = mapping(0x1000, 0x1fff, 0x1000, Permissions::ReadWrite);
    for _ in 0..20 {
        *fake.is_stuck.lock() = false;
        attach(&follower, &[page]).unwrap();
        *fake.is_stuck.lock() = true;
        follower.unmapped(&[page]);
    }
    for _ in 0..20 {
        follower.attached(DmaReach::Nothing).unwrap_err();
    }
    let lines = RECORDER.0.lock();
    let count = |text: &str| lines.iter().filter(|line| line.starts_with("often: ") && line.contains(text)).count();
    assert_eq!(count("cannot take memory from a device of the host"), 5, "20 times");
    assert_eq!(count("may still reach memory that its guest has taken from it"), 6, "40 times");
}

#[test]
fn unmap_succeeds_whatever_size_the_kernel_reports() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (follower, memory) = follower(&fake);
    let page = |n: u64| mapping(n << 12, (n << 12) + 0xfff, n << 12, Permissions::ReadWrite);
    *fake.miscounts.lock() = true;
    for _ in 0..3 {
        attach(&follower, &[page(1), page(2), page(5)]).unwrap();
        follower.unmapped(&[page(1), page(2)]);
        assert_eq!(fake.sorted(), [(0x5000, 0x1000)], "not all of it");
        follower.mapped(page(1)).unwrap();
        follower.set_memory(&memory).unwrap();
        assert_eq!(fake.sorted(), [(0x1000, 0x1000), (0x5000, 0x1000)]);
    }
    follower.attached(DmaReach::Nothing).unwrap();
    assert_eq!((fake.sorted(), follower.refused()), (vec![], 0));
}

/// Step of a guest.
#[derive(Debug, Clone)]
enum Step {
    Map(u64, u64, u64, Permissions),
    Unmap(u64, u64),
    Attach(u8),
    Memory(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let access = prop_oneof![Just(Permissions::Read), Just(Permissions::Write), Just(Permissions::ReadWrite)];
    let step = prop_oneof![
        (0_u64..64, 1_u64..8, 0_u64..300, access).prop_map(|(at, len, to, access)| Step::Map(at, len, to, access)),
        (0_u64..64, 1_u64..64).prop_map(|(at, len)| Step::Unmap(at, len)),
        (0_u8..3).prop_map(Step::Attach),
        any::<bool>().prop_map(Step::Memory),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    /// After each request, the device reaches exactly the existing memory that the domain maps.
    #[test]
    fn a_device_reaches_what_its_domain_maps_and_nothing_else(steps in steps()) {
        let fake = FakeIommu::new(vec![0..=u64::MAX]);
        let (follower, small) = follower(&fake);
        let region = virtio_devices::GuestRegion::from_range(GuestAddress(0x10_0000), 0x1_0000, None).unwrap();
        let large = small.insert_region(Arc::new(region)).unwrap();
        let (mut memory, mut model, mut mode) = (small.clone(), Vec::<DmaMapping>::new(), 1);
        for step in steps {
            match step {
                Step::Map(at, len, to, access) if mode == 2 => {
                    let new = mapping(at << 12, ((at + len) << 12) - 1, to << 12, access);
                    if model.iter().all(|old| old.last < new.first || new.last < old.first) {
                        follower.mapped(new).unwrap();
                        model.push(new);
                    }
                }
                Step::Unmap(at, len) if mode == 2 => {
                    let (first, last) = (at << 12, ((at + len) << 12) - 1);
                    let whole = |old: &DmaMapping| first <= old.first && old.last <= last;
                    let touched = |old: &DmaMapping| old.first <= last && first <= old.last;
                    if model.iter().all(|old| whole(old) || !touched(old)) {
                        let mut gone: Vec<_> = model.iter().filter(|old| whole(old)).copied().collect();
                        gone.sort_by_key(|old| old.first);
                        model.retain(|old| !whole(old));
                        if !gone.is_empty() {
                            follower.unmapped(&gone);
                        }
                    }
                }
                Step::Map(..) | Step::Unmap(..) => {}
                Step::Attach(to) => {
                    mode = to;
                    model.clear();
                    let mut none = std::iter::empty();
                    let reach = match to {
                        0 => DmaReach::Nothing,
                        1 => DmaReach::Everything,
                        _ => DmaReach::Mapped(&mut none),
                    };
                    follower.attached(reach).unwrap();
                }
                Step::Memory(more) => {
                    memory = if more { large.clone() } else { small.clone() };
                    follower.set_memory(&memory).unwrap();
                }
            }
            for page in 0..0x120_u64 {
                let address = page << 12;
                let at = |target| Some(memory.get_host_address(GuestAddress(target)).ok()? as u64);
                let expected = match mode {
                    0 => None,
                    1 => at(address).map(|host| (host, Permissions::ReadWrite)),
                    _ => model.iter().find(|old| old.first <= address && address <= old.last).and_then(|old| {
                        Some((at(old.target + (address - old.first))?, old.access))
                    }),
                };
                prop_assert_eq!(fake.at(address), expected, "{:#x}", address);
            }
        }
    }
}
