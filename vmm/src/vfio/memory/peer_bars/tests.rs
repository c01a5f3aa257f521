//! BARs that are mapped and unmapped over a fake host IOMMU.

use std::io;

use super::*;
use crate::vfio::memory::fake_iommu::{FakeIommu, memory};

const LEN: u64 = 0x2000;
/// Address of a BAR.
const BAR: u64 = 0xc000_0000;
const RAM: [(u64, u64); 2] = [(0, 0x3000), (1 << 32, 0x1000)];

fn bar() -> Arc<FileMapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN).unwrap();
    Arc::new(FileMapping::new(&file, LEN, false).unwrap())
}

/// An address space with memory below and above a BAR.
fn space(fake: &Arc<FakeIommu>) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(Arc::clone(fake) as _, &memory(&[(0, 0x3000), (1 << 32, 0x1000)])).unwrap())
}

fn with(bar: u64) -> Vec<(u64, u64)> {
    vec![RAM[0], (bar, LEN), RAM[1]]
}

#[test]
fn bar_is_mapped_read_write_at_its_guest_address_for_peers() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (bars, space, bar) = (PeerBars::default(), space(&fake), bar());
    bars.join(&space);
    bars.map(BAR, &bar);
    assert_eq!(fake.sorted(), with(BAR));
    let host = bar.address() as u64;
    assert_eq!(fake.at(BAR + 0x1234), Some((host + 0x1234, vm_memory::Permissions::ReadWrite)));
    bars.unmap(BAR, &bar);
    assert_eq!(fake.sorted(), RAM);
    bars.unmap(BAR, &bar);
    assert_eq!(Arc::strong_count(&bar), 1, "nothing keeps it");
}

#[test]
fn peer_bars_survive_memory_growth_and_end_with_the_space() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (bars, space, bar) = (PeerBars::default(), space(&fake), bar());
    bars.join(&space);
    bars.map(BAR, &bar);
    let grown = memory(&[(0, 0x5000), (1 << 33, 0x1000)]);
    space.set(&grown).unwrap();
    assert_eq!(fake.sorted(), [(0, 0x5000), (BAR, LEN), (1 << 33, 0x1000)]);
    // Its last device is removed, and then the BAR of a device behind the virtual IOMMU.
    drop(space);
    assert_eq!(fake.sorted(), []);
    bars.unmap(BAR, &bar);
    assert_eq!(Arc::strong_count(&bar), 1);
}

#[test]
fn devices_that_come_later_reach_the_bars_that_are_there() {
    let bars = PeerBars::default();
    let (first, gone) = (bar(), bar());
    bars.map(BAR, &first);
    bars.map(BAR + LEN, &gone);
    bars.unmap(BAR + LEN, &gone);
    for _ in 0..2 {
        let fake = FakeIommu::new(vec![0..=u64::MAX]);
        let space = space(&fake);
        bars.join(&space);
        assert_eq!(fake.sorted(), with(BAR));
    }
}

#[test]
fn unreachable_bar_warns_once_and_leaves_others_mapped() {
    let fake = FakeIommu::new(vec![0..=0xff_ffff_ffff]);
    let (bars, space, [low, high]) = (PeerBars::default(), space(&fake), [bar(), bar()]);
    bars.join(&space);
    bars.map(BAR, &low);
    assert!(!bars.0.lock().warned);
    bars.map(1 << 40, &high);
    assert_eq!((fake.sorted(), bars.0.lock().warned), (with(BAR), true));
    // The BAR is not mapped, so nothing is unmapped.
    bars.unmap(1 << 40, &high);
    assert_eq!(fake.sorted(), with(BAR));
    let mut warned = true;
    let bar = BarMemory { address: 1 << 40, memory: high };
    let refused = || space.map_bar(&bar).unwrap_err();
    note(&mut warned, &bar, Err(refused()));
    assert_eq!(
        warning(&bar, &refused()),
        "devices of the host do not reach the BAR of another at 0x10000000000: they reach 0x0 to 0xffffffffff; they \
         work without, and --platform vfio_p2p_dma=off keeps this VM from trying"
    );
}

#[test]
fn bar_refused_by_the_kernel_is_retried_at_its_next_address() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (bars, space, bar) = (PeerBars::default(), space(&fake), bar());
    bars.join(&space);
    *fake.left.lock() = 0;
    bars.map(BAR, &bar);
    assert_eq!((fake.sorted(), bars.0.lock().warned), (RAM.to_vec(), true));
    bars.unmap(BAR, &bar);
    bars.map(BAR + LEN, &bar);
    assert_eq!(fake.sorted(), with(BAR + LEN));
    let bar = BarMemory { address: BAR, memory: bar };
    let error = VfioError::Map(io::Error::from_raw_os_error(libc::EFAULT));
    assert!(warning(&bar, &error).contains(" at 0xc0000000: Bad address (os error 14); they work without"));
}

#[test]
fn a_bar_that_cannot_be_taken_back_stays_in_this_process() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (bars, space, bar) = (PeerBars::default(), space(&fake), bar());
    bars.join(&space);
    bars.map(BAR, &bar);
    *fake.left.lock() = 0;
    bars.unmap(BAR, &bar);
    assert_eq!((fake.sorted(), Arc::strong_count(&bar)), (with(BAR), 2));
    drop(bar);
    // The fake IOMMU checks that the BAR still exists.
    drop(space);
    assert_eq!(fake.sorted(), []);
}

#[test]
fn memory_that_comes_to_the_address_of_a_bar_is_memory() {
    let fake = FakeIommu::new(vec![0..=u64::MAX]);
    let (bars, space, bar) = (PeerBars::default(), space(&fake), bar());
    bars.join(&space);
    bars.map(BAR, &bar);
    let grown = memory(&[(0, 0x3000), (BAR, 0x4000)]);
    space.set(&grown).unwrap();
    assert_eq!(fake.sorted(), [(0, 0x3000), (BAR, 0x4000)]);
    bars.unmap(BAR, &bar);
    assert_eq!(fake.sorted(), [(0, 0x3000), (BAR, 0x4000)]);
}
