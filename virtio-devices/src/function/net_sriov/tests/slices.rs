//! The VF that an access to a VF window reaches.

use super::*;

/// G15: the VF whose slice is accessed.
#[test]
fn an_access_to_the_slice_of_a_vf_hits_exactly_that_vf() {
    let mut device = idle();
    let _ = enable(&mut device, 3);
    for index in 0..3 {
        let _ = vf(&mut device, index).bar_write(2, 0x200, 4, 0xa0 + u32::from(index));
    }
    for index in 0..3 {
        assert_eq!(device.vf(VfIndex(index)).unwrap().device().config[0], 0xa0 + u8::try_from(index).unwrap());
        assert_eq!(vf(&mut device, index).bar_read(2, 0x200, 4), 0xa0 + u32::from(index));
    }
    assert_eq!(vf(&mut device, 3).bar_read(2, 0x200, 4), ALL_ONES);
    assert_eq!(device.pf().device().config, [0; 8]);
}

/// G16: reads and writes with each of VF Enable and VF MSE.
#[test]
fn vfs_decode_only_with_vf_enable_and_vf_mse() {
    for (control, decodes) in [(0, false), (1, false), (8, false), (9, true)] {
        let mut device = idle();
        let mut pf = pf(&mut device);
        let _ = pf.config_write(SRIOV + 0x10, 2, 2);
        let _ = pf.config_write(SRIOV + 8, 2, control);
        assert_eq!(windows(&device).len(), if decodes { 2 } else { 0 });
        assert_eq!(vf(&mut device, 0).bar_read(2, 0x12, 2) == 3, decodes, "Control {control}");
        let _ = vf(&mut device, 0).bar_write(2, 0x200, 4, 1);
        assert_eq!(device.vf(VfIndex(0)).unwrap().device().config[0] == 1, decodes);
    }
}

/// G13: slices of a larger System Page Size.
#[test]
fn a_larger_system_page_size_spreads_the_slices() {
    let mut device = idle();
    let _ = pf(&mut device).config_write(SRIOV + 0x20, 4, 1 << 4);
    let _ = enable(&mut device, 2);
    let (registers, msix) = (WindowId::VfBar(BarIndex::ALL[2]), WindowId::VfBar(BarIndex::ALL[4]));
    assert_eq!(windows(&device), [(registers, 0x2_0000), (msix, 0x2_0000)]);
    let mut second = Driver::of_vf(&mut device, vf_rid(1), 0x1_0000);
    assert_eq!(second.init(), 15);
    assert_eq!(second.bar_read(2, SLICE, 4), ALL_ONES, "a slice is larger than what the VF decodes");
    assert_eq!(running(&device), [1]);
}

/// G18: the PF's Command and its VFs.
#[test]
fn the_pfs_memory_space_and_bus_master_enables_do_not_gate_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    vf(&mut device, 0).init();
    let _ = pf(&mut device).config_write(4, 2, 0);
    assert_eq!(windows(&device).len(), 2);
    assert_eq!(vf(&mut device, 0).status(), 15);
    assert_eq!(running(&device), [0]);
}

/// G36: where a VF's virtio structures are.
#[test]
fn the_capabilities_of_a_vf_name_the_pfs_vf_bars() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    let vf_bars: Vec<_> = (0..6).filter(|bar| pf(&mut device).config_read(SRIOV + 0x24 + 4 * bar, 4) != 0).collect();
    assert_eq!(vf_bars, [2, 4]);
    for cfg_type in 1..=4 {
        let structure = vf(&mut device, 0).structure(cfg_type).unwrap();
        assert_eq!(structure.bar, 2);
        assert!(u64::from(structure.offset + structure.length) <= SLICE);
    }
}
