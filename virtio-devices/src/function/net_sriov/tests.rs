use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pci::spec::ALL_ONES;
use pci::{BarIndex, Effects, Function, VfChange, VfPlacement};

use super::*;
use crate::Status;
use crate::testing::{Driver, FakeDevice, Hosted, memory};

type Nic = Hosted<NetSriov<FakeDevice>>;

const QUEUES: &[u16] = &[256, 256, 64];
const PF: Rid = Rid::from_bits(3 << 3);
/// The SR-IOV capability in the PF's configuration space.
const SRIOV: u64 = 0x100;
const TOTAL: u16 = 4;
/// The size of a VF's slice of the registers' BAR in bytes.
const SLICE: u64 = 0x2000;

fn placement(total_vfs: u16) -> Placement {
    let vfs = VfPlacement { total_vfs, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 1 };
    Placement { segment: 0, rid: PF, vfs: Some(vfs) }
}

fn device(total_vfs: u16, new: fn(&[u16]) -> FakeDevice) -> Nic {
    let vfs = (0..total_vfs).map(|_| new(QUEUES)).collect();
    Hosted::new(NetSriov::new(new(QUEUES), vfs, placement(total_vfs), &memory()).unwrap())
}

fn idle() -> Nic {
    device(TOTAL, FakeDevice::new)
}

fn threaded() -> Nic {
    device(TOTAL, FakeDevice::with_worker)
}

fn vf_rid(index: u16) -> Rid {
    Rid::from_bits(0x100 + index)
}

fn pf(device: &mut Nic) -> Driver<'_, Nic> {
    Driver::new(device, PF)
}

fn vf(device: &mut Nic, index: u16) -> Driver<'_, Nic> {
    Driver::of_vf(device, vf_rid(index), u64::from(index) * SLICE)
}

/// Sets NumVFs, then VF Enable and VF MSE, as Linux does.
fn enable(device: &mut Nic, num_vfs: u16) -> Effects {
    let mut pf = pf(device);
    let _ = pf.config_write(SRIOV + 0x10, 2, num_vfs.into());
    pf.config_write(SRIOV + 8, 2, 0x9)
}

fn disable(device: &mut Nic) -> Effects {
    pf(device).config_write(SRIOV + 8, 2, 0)
}

fn windows(device: &Nic) -> Vec<(WindowId, u64)> {
    let mut out = Vec::new();
    device.windows(&mut out);
    out.into_iter().map(|window| (window.id, window.len)).collect()
}

fn join(device: &mut Nic) -> usize {
    device.join()
}

fn running(device: &Nic) -> Vec<u16> {
    (0..TOTAL).filter(|index| device.vf(VfIndex(*index)).unwrap().is_running()).collect()
}

fn wait_for_kick(device: &Nic, index: u16) {
    let counters = &device.vf(VfIndex(index)).unwrap().device().counters;
    let end = Instant::now() + Duration::from_secs(10);
    while counters.kicks.load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < end, "the worker of VF {index} is kicked when it starts");
        std::thread::yield_now();
    }
}

/// Everything that a guest can read of VF `index`, without side effects.
fn image(device: &mut Nic, index: u16) -> Vec<u32> {
    let config: Vec<_> = Dword::all().map(|reg| device.config_read(vf_rid(index), reg)).collect();
    let mut vf = vf(device, index);
    let common = (0..0x40).map(|offset| vf.bar_read(2, offset, if offset % 4 == 0 { 4 } else { 1 }));
    let mut image: Vec<_> = config.into_iter().chain(common).collect();
    image.extend((0..8).map(|offset| vf.bar_read(2, 0x200 + offset, 1)));
    // The MSI-X slices are 4 KiB.
    let base = u64::from(index) * 0x1000;
    for offset in (0..0x900).step_by(4) {
        let mut data = [0; 4];
        device.mmio_read(WindowId::VfBar(BarIndex::ALL[4]), base + offset, &mut data);
        image.push(u32::from_le_bytes(data));
    }
    image
}

fn set_up_msix(device: &mut Nic, index: u16) {
    let base = u64::from(index) * 0x1000;
    for vector in 0..4 {
        for (offset, value) in [(0, 0xfee0_0000u32), (8, u32::from(index) << 8 | vector), (12, 0)] {
            let at = base + u64::from(vector) * 16 + offset;
            let _ = device.mmio_write(WindowId::VfBar(BarIndex::ALL[4]), at, &value.to_le_bytes());
        }
    }
    let mut vf = vf(device, index);
    let msix = vf.capability(0x11, |_| true).unwrap();
    let _ = vf.config_write(msix + 2, 2, 0x8000);
}

mod functions;
mod life;
mod slices;
mod wants;

#[path = "properties.rs"]
mod properties;

#[path = "state_tests.rs"]
mod state;

#[path = "model_tests.rs"]
mod model;
