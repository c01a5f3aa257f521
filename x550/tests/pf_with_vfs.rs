//! A NIC as a device of the crate `pci`: functions that share its registers, found through configuration space.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::convert::Infallible;
use std::sync::Arc;

use common::MAC;
use parking_lot::Mutex;
use pci::{
    BarIndex, ConfigShape, ConfigSpace, Device, Dword, DwordWrite, Effects, Function, Outcome, PfWithVfs, PortType,
    Rid, VfIndex, VfPlacement, WindowId,
};
use x550::{Nic, Place, REGISTERS_BAR, TOTAL_VFS, pf_config, vf_config};

/// A function of a NIC.
struct Half {
    place: Place,
    config: ConfigSpace,
    nic: Arc<Mutex<Nic>>,
}

impl Half {
    fn new(place: Place, shape: ConfigShape, nic: &Arc<Mutex<Nic>>) -> Self {
        Self { place, config: ConfigSpace::new(shape).unwrap(), nic: nic.clone() }
    }
}

impl Function for Half {
    type Stopping = Infallible;

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn changed(&mut self, effects: Effects, _: bool) -> Outcome<Infallible> {
        let mut nic = self.nic.lock();
        if effects.reset.is_some() {
            let _ = match self.place {
                Place::Pf => nic.reset(),
                Place::Vf(index) => nic.reset_vf(index),
            };
        }
        if let Some(sriov) = self.config.sriov() {
            let _ = nic.set_num_vfs(sriov.num_visible());
        }
        effects.into()
    }

    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        if bar == REGISTERS_BAR {
            self.nic.lock().read(self.place, offset, data);
        } else if !self.config.msix_read(bar, offset, data, |_| false) {
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], _: bool) -> Outcome<Infallible> {
        if bar == REGISTERS_BAR {
            let _ = self.nic.lock().write(self.place, offset, data);
        }
        self.config.msix_write(bar, offset, data).unwrap_or(Effects::NONE).into()
    }
}

const PF_RID: Rid = Rid::from_bits(8);

fn device() -> (PfWithVfs<Half>, Arc<Mutex<Nic>>) {
    let nic = Arc::new(Mutex::new(Nic::new(MAC)));
    let port = PortType::RcIntegratedEndpoint;
    let vfs = VfPlacement { total_vfs: TOTAL_VFS, first_vf_offset: 0x80, vf_stride: 2 };
    let pf = Half::new(Place::Pf, pf_config(PF_RID, MAC, vfs, port), &nic);
    let all = (0..TOTAL_VFS).map(|index| Half::new(Place::Vf(index), vf_config(port), &nic)).collect();
    (PfWithVfs::new(PF_RID, pf, all).unwrap(), nic)
}

fn config(device: &mut PfWithVfs<Half>, rid: Rid, offset: u16, value: u32) {
    let _ = device.config_write(rid, Dword::containing(offset), DwordWrite::full(value));
}

/// NumVFs, then VF Enable and VF MSE.
fn enable(device: &mut PfWithVfs<Half>, num_vfs: u32) {
    config(device, PF_RID, 0x160 + 0x10, num_vfs);
    config(device, PF_RID, 0x160 + 8, 1 | 8);
}

#[test]
fn all_63_vfs_exist_and_reach_their_own_registers() {
    let (mut device, nic) = device();
    enable(&mut device, 63);
    assert_eq!((device.num_visible(), device.vf_index(Rid::from_bits(8 + 0x80 + 2 * 62))), (63, Some(VfIndex(62))));
    let status = common::peek(&nic.lock(), Place::Pf, 8);
    assert_eq!(status >> 10 & 0xff, 63);
    for index in 0..63 {
        let offset = device.slice(REGISTERS_BAR, VfIndex(index)).unwrap() + 0x200;
        let _ = device.mmio_write(WindowId::VfBar(REGISTERS_BAR), offset, &u32::from(index + 1).to_le_bytes());
        let _ = device.mmio_write(WindowId::VfBar(REGISTERS_BAR), offset + 0xfc, &1u32.to_le_bytes());
    }
    let mut buffer = [0; 4];
    for index in 0..63u8 {
        device.mmio_read(WindowId::Bar(REGISTERS_BAR), 0x13000 + 64 * u64::from(index), &mut buffer);
        assert_eq!(buffer, [index + 1, 0, 0, 0]);
    }
    device.mmio_read(WindowId::Bar(REGISTERS_BAR), 0x71c, &mut buffer);
    assert_eq!(u32::from_le_bytes(buffer), 0x7fff, "requests of VFs 48 to 62");
}

#[test]
fn a_function_level_reset_of_a_vf_is_an_event_for_its_pf() {
    let (mut device, nic) = device();
    enable(&mut device, 4);
    let _ = nic.lock().write(Place::Pf, 0x700, &[0xff; 4]);
    config(&mut device, Rid::from_bits(8 + 0x80 + 4), 0xa8, 1 << 15);
    assert_eq!(common::peek(&nic.lock(), Place::Pf, 0x700), 1 << 2);
    config(&mut device, PF_RID, 0xa8, 1 << 15);
    assert_eq!((device.num_visible(), common::peek(&nic.lock(), Place::Pf, 8) >> 10 & 0xff), (0, 0));
}

#[test]
fn device_control_is_where_drivers_read_it() {
    let (device, _) = device();
    let read = |offset| device.config_read(PF_RID, Dword::containing(offset));
    assert_eq!((read(0xa0) & 0xff, read(0x70) & 0xff, read(0x40) & 0xff), (0x10, 0x11, 0x01));
    assert_eq!(read(0xa8), 0x2810, "Device Control, Device Status");
}
