//! Functions of the device, and the registers of each.

use super::*;

/// G19: VFs that do not exist.
#[test]
fn a_hidden_vf_reads_all_ones_and_drops_writes() {
    let mut device = idle();
    for index in 0..TOTAL + 2 {
        assert!(Dword::all().all(|reg| device.config_read(vf_rid(index), reg) == ALL_ONES));
        assert!(vf(&mut device, index).set_bus_master(true).is_none());
        assert!(image(&mut device, index).iter().all(|value| matches!(*value, 0xff | ALL_ONES)));
    }
    let _ = enable(&mut device, TOTAL);
    let fresh = image(&mut device, 0);
    assert_eq!(vf(&mut device, 0).config_read(4, 2), 0, "the write to Command was dropped");
    let mut untouched = idle();
    let _ = enable(&mut untouched, TOTAL);
    assert_eq!(fresh, image(&mut untouched, 0));
}

/// G20: the routing IDs that respond.
#[test]
fn exactly_the_first_num_vfs_routing_ids_respond() {
    for num_vfs in 0..=TOTAL {
        let mut device = idle();
        let effects = enable(&mut device, num_vfs);
        assert_eq!(effects.vfs, Some(VfChange::Enabled { num_vfs }));
        let responding: Vec<_> = (0..=u16::MAX)
            .map(Rid::from_bits)
            .filter(|rid| device.config_read(*rid, Dword::containing(8)) != ALL_ONES)
            .collect();
        let expected: Vec<_> = std::iter::once(PF).chain((0..num_vfs).map(vf_rid)).collect();
        assert_eq!(responding, expected);
    }
}

/// G6, B1: NumVFs above TotalVFs.
#[test]
fn more_vfs_than_there_are_cannot_be_enabled() {
    for num_vfs in [TOTAL + 1, u16::MAX] {
        let mut device = idle();
        assert_eq!(enable(&mut device, num_vfs).vfs, None);
        assert_eq!(device.functions.num_visible(), 0);
        assert!(windows(&device).is_empty());
    }
}

/// G29, G30, G31, G32, G33, G34, B12: the header and the capabilities of each VF.
#[test]
fn the_header_of_a_vf_is_a_vfs() {
    let mut device = idle();
    let _ = enable(&mut device, TOTAL);
    for index in 0..TOTAL {
        for offset in (0..0x40).step_by(4).filter(|offset| *offset != 4) {
            let before = vf(&mut device, index).config_read(offset, 4);
            let _ = vf(&mut device, index).config_write(offset, 4, ALL_ONES);
            assert_eq!(vf(&mut device, index).config_read(offset, 4), before, "offset {offset:#x} is read-only");
        }
        let mut vf = vf(&mut device, index);
        assert_eq!(vf.config_read(0, 4), ALL_ONES);
        let _ = vf.config_write(4, 4, ALL_ONES);
        assert_eq!(vf.config_read(4, 4), 0x0010_0004);
        let _ = vf.config_write(4, 2, 0);
        let zero = [0x0c, 0x10, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x28, 0x30, 0x3c, 0x100];
        assert!(zero.iter().all(|offset| vf.config_read(*offset, 4) == 0));
        assert_eq!(vf.config_read(0x2c, 4), 0x1041_1af4);
        let pcie = vf.capability(0x10, |_| true).unwrap();
        assert_eq!(vf.config_read(pcie + 4, 4) >> 28 & 1, 1, "FLR");
        assert!(vf.capability(0x11, |_| true).is_some());
        assert_eq!(vf.config_read(8, 4), pf(&mut device).config_read(8, 4), "class and revision");
    }
}

#[test]
fn only_the_pf_offers_sr_iov() {
    let mut device = idle();
    let _ = enable(&mut device, 1);
    let features = |mut driver: Driver<'_, Nic>| driver.negotiate();
    assert_eq!(features(pf(&mut device)) >> 37 & 1, 1);
    assert_eq!(features(vf(&mut device, 0)) >> 37 & 1, 0);
}

/// G22, B15: more VFs than a bus holds.
#[test]
fn a_thousand_vfs_appear_across_buses_and_each_has_its_slice() {
    let mut device = device(1024, FakeDevice::new);
    let _ = enable(&mut device, 1024);
    for index in [0, 255, 256, 1023] {
        assert_eq!(vf_rid(index).bus(), 1 + u8::try_from(index / 256).unwrap());
        assert_eq!(vf(&mut device, index).init(), 15);
        assert_eq!(device.vf(VfIndex(index)).unwrap().rid(), vf_rid(index));
        assert!(device.vf(VfIndex(index)).unwrap().is_running());
    }
    assert_eq!(windows(&device)[0].1, 1024 * SLICE);
    let _ = disable(&mut device);
    assert!((0..1024).all(|index| !device.vf(VfIndex(index)).unwrap().is_running()));
}

/// B18: one VF, stride 0.
#[test]
fn a_single_vf_needs_no_stride() {
    let vfs = VfPlacement { total_vfs: 1, first_vf_offset: 0x100 - PF.to_bits(), vf_stride: 0 };
    let placement = Placement { segment: 0, rid: PF, vfs: Some(vfs) };
    let device = NetSriov::new(FakeDevice::new(QUEUES), vec![FakeDevice::new(QUEUES)], placement, &memory());
    let mut device = Hosted::new(device.unwrap());
    let _ = enable(&mut device, 1);
    assert_eq!(vf(&mut device, 0).init(), 15);
}

/// B20: VFs that cannot belong to one PF.
#[test]
fn a_vf_of_another_shape_is_named() {
    let new = |vfs: Vec<FakeDevice>, total| NetSriov::new(FakeDevice::new(QUEUES), vfs, placement(total), &memory());
    let error = |vfs, total| new(vfs, total).err().unwrap().to_string();
    let good = || FakeDevice::new(QUEUES);
    assert_eq!(
        error(vec![good(), good(), FakeDevice::new(&[256; 5])], 3),
        "VF 2 has 5 queues and VF 0 has 3; all VFs of a PF must have the same number"
    );
    assert_eq!(
        error(vec![good(), FakeDevice::new(&[256, 256, 3])], 2),
        "VF 1: queue 2: a size of 3 is not a power of two from 1 to 32768"
    );
    assert_eq!(error(vec![good()], 2), "1 VFs at a place that reserves 2");
    assert_eq!(error(vec![], 1), "0 VFs at a place that reserves 1");
}
